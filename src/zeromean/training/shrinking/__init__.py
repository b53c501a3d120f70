"""Networks made smaller and faster where they run: `zeromean.training.shrink`."""
