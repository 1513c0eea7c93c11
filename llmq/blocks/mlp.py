"""Feed-forward sublayer. What varies between models is the activation, an object."""

from llmq.protocols import Activation, Into, Onto, Ops, Parameters, Site, Slots
from llmq.tensor import Ref, Slot


class Glu:
    """act = activation(gate) * up (Shazeer, 2020), of gate_up (...,2F), gate first; SwiGLU with silu."""

    maps = 2

    def __init__(self, activation: str = "silu") -> None:
        self.numbers = {} if activation == "silu" else {"activation": activation}

    def forward(self, ops: Ops, act: Ref, gate_up: Ref) -> None:
        """act (...,F) <- gate_up."""
        ops.swiglu_forward(act, gate_up, **self.numbers)

    def backward(self, ops: Ops, d_gate_up: Ref, d_act: Ref, gate_up: Ref) -> None:
        """d_gate_up (...,2F) <- d_act (...,F), gate_up."""
        ops.swiglu_backward(d_gate_up, d_act, gate_up, **self.numbers)


class Plain:
    """act = activation(up), of an MLP without a gate."""

    maps = 1

    def __init__(self, activation: str) -> None:
        self.activation = activation

    def forward(self, ops: Ops, act: Ref, up: Ref) -> None:
        """act (...,F) <- up (...,F)."""
        ops.activation_forward(act, up, activation=self.activation)

    def backward(self, ops: Ops, d_up: Ref, d_act: Ref, up: Ref) -> None:
        """d_up (...,F) <- d_act (...,F), up (...,F)."""
        ops.activation_backward(d_up, d_act, up, activation=self.activation)


class Mlp:
    """out = res + down(activation(gate, up)), (gate, up) = W_up rmsnorm(res), with `into` and `onto` the stream as they
    are made.

    res, x, out (B,T,C); gate_up (B,T,2F), gate first, or (B,T,F) without a gate; act (B,T,F); rstd (B,T).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        into: Into,
        up: Site,
        activation: Activation,
        down: Site,
        onto: Onto,
    ) -> None:
        self.c, self.f, self.into, self.onto = hidden_size, intermediate_size, into, onto
        self.up, self.activation, self.down = up, activation, down

    @property
    def sites(self) -> tuple[Site, ...]:
        """Its linear maps, in the order of the forward pass."""
        return (self.up, self.down)

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens."""
        x, *stats = self.into.slots(b, t, self.c)
        act, width = Slot("act", (b, t, self.f), ("swiglu",)), self.activation.maps * self.f
        gate_up = Slot("gate_up", (b, t, width), ("ffn",))
        own = (*self.up.slots(x), *self.down.slots(act), *self.onto.slots(b, t, self.c))
        return (x, *stats, gate_up, act, *own)

    def pieces(self, a: Slots) -> list[Slots]:
        """Frames of what is made again and goes back at a time: all of it."""
        return [a]

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.out <- a.res."""
        self.into.forward(ops, a, w, self.up, a.gate_up)
        self.activation.forward(ops, a.act, a.gate_up)
        self.onto.forward(ops, a, w, self.down, a.act)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.res, dw <- d.out."""
        self.onto.backward(ops, a, d, w, dw, self.down, d.act, a.act)
        self.activation.backward(ops, d.gate_up, d.act, a.gate_up)
        self.into.backward(ops, a, d, w, dw, self.up, d.gate_up)
