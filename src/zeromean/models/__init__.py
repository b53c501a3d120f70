"""The papers' networks; every layer can be given by a factory."""

from zeromean.models.airbench import airbench_like, whiten_
from zeromean.models.dense import mlp
from zeromean.models.lenet import lenet5, lenet5_caffe, lenet_300_100
from zeromean.models.multi_head import MultiHead
from zeromean.models.residual import resnet
from zeromean.models.toy import toy_network
from zeromean.models.vgg import vgg_like

__all__ = [
    "MultiHead",
    "airbench_like",
    "lenet5",
    "lenet5_caffe",
    "lenet_300_100",
    "mlp",
    "resnet",
    "toy_network",
    "vgg_like",
    "whiten_",
]
