"""What block code calls ops by: their names and arguments, with Refs in place of tensors.

An editor follows `ops.` by this; the planner's recorder and a backend have the same methods.
"""

from llmq.tensor import Ref

class Ops:
    """Every op, as a recorder takes it: handles, no arrays. The outputs come first; None is one that is not wanted."""

    # ops: written by `python tests/test_protocols.py`

    def adamw(
        self,
        new_master: Ref | None,
        new_m: Ref | None,
        new_v: Ref | None,
        weight: Ref | None,
        /,
        master: Ref,
        m: Ref,
        v: Ref,
        grad: Ref,
        scale: Ref,
        apply: Ref,
        learning_rate: Ref,
        step: Ref,
        *,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        weight_decay: float,
        seed: int,
        stream: int,
        first: int = 0,
        rate: float = 1.0,
    ) -> None:
        """new_master, new_m, new_v, weight <- master, m, v, grad (one shape); the other four are (1,)."""

    def all_gather(self, out: Ref | None, /, x: Ref | None, *, bounds: tuple[int, ...]) -> None:
        """out (...,K) <- x (n,K) or None: each rank's rows of out, in the form of both, with its scales."""

    def all_reduce(self, out: Ref | None, /, x: Ref, *, largest: bool = False) -> None:
        """out (n,) <- x (n,): the sum over ranks, or the `largest`, number by number; for a few numbers."""

    def all_to_all(self, pieces: Ref | None, /, x: Ref, *, bounds: tuple[int, ...]) -> None:
        """pieces (R-1,m,K) <- x (...,K): this rank's n rows of every other rank's x, in the form of both."""

    def amax(self, out: Ref | None, /, x: Ref, *, in_bf16: bool) -> None:
        """out (1,) f32 <- the largest magnitude of x (any shape, in any form), exact or in bf16."""

    def amax_scale(self, scale: Ref | None, /, x: Ref, *, limit: float) -> None:
        """scale (1,) <- x (any shape): amax(|x|) / limit, which maps amax to `limit`; 1 if amax is 0 or not finite."""

    def apply_if_finite(self, out: Ref | None, /, partials: Ref, apply: Ref) -> None:
        """out (1,) <- apply (1,) if all partials (P,), sums of squares, are finite, else 0."""

    def attention_backward(
        self,
        d_qkv: Ref | None,
        /,
        d_att: Ref,
        qkv: Ref,
        att: Ref,
        lse: Ref,
        borders: Ref | None,
        *,
        num_heads: int,
        num_kv_heads: int,
        window: int | None,
        longest: int | None,
        softmax_scale: float,
    ) -> None:
        """d_qkv (B,T,(Hq+2Hkv)*Hd) <- d_att (B,T,Hq*Hd), qkv, att like d_att, lse, borders as in forward."""

    def attention_cached(
        self,
        att: Ref | None,
        new_cache: Ref | None,
        /,
        qkv: Ref,
        cache: Ref,
        table: Ref,
        positions: Ref,
        *,
        num_heads: int,
        num_kv_heads: int,
        window: int | None,
        softmax_scale: float,
    ) -> None:
        """att (B,1,Hq*Hd), new_cache (B,S,2*Hkv*Hd) <- qkv (B,1,(Hq+2Hkv)*Hd), cache, table (S,Hd), positions (B,1)."""

    def attention_forward(
        self,
        att: Ref | None,
        lse: Ref | None,
        /,
        qkv: Ref,
        borders: Ref | None,
        *,
        num_heads: int,
        num_kv_heads: int,
        window: int | None,
        longest: int | None,
        softmax_scale: float,
    ) -> None:
        """att (B,T,Hq*Hd), lse (B,Hq,T) <- qkv (B,T,(Hq+2Hkv)*Hd); lse = log sum over seen keys of exp(scale q k)."""

    def bias_backward(self, d_bias: Ref | None, /, d_y: Ref) -> None:
        """d_bias (N,) <- d_y (...,N) in colsum form, read as its (parts,N) partial sums."""

    def cache_write(
        self, cache: Ref | None, /, rot: Ref, positions: Ref, sequences: Ref, *, num_heads: int, num_kv_heads: int
    ) -> None:
        """cache (B,S,2*Hkv*Hd) <- rot (R,T,(Hq+2Hkv)*Hd), positions, sequences (R,T) int32; the rest of cache stays."""

    def cast(self, out: Ref | None, /, x: Ref) -> None:
        """out, in every wanted form, <- x (the same shape). fp8 columns of fp8 rows are the same bytes and scales."""

    def copy_to_device(self, out: Ref | None, /, x: Ref) -> None:
        """out <- x, in the one form that both have, with the scales of a form that owns its scales."""

    def copy_to_host(self, out: Ref | None, /, x: Ref) -> None:
        """out <- x, in the one form that both have, with the scales of a form that owns its scales."""

    def cross_entropy(
        self, d_logits: Ref | None, loss: Ref | None, /, logits: Ref, targets: Ref, *, vocab_size: int, z_loss: float
    ) -> None:
        """d_logits (M,Vp), loss (M,) <- logits (M,Vp), targets (M,) int32; d_logits: gradient of the sum of losses."""

    def dropout(
        self,
        out: Ref | None,
        /,
        x: Ref,
        samples: Ref,
        residual: Ref | None,
        *,
        rate: float,
        seed: int,
        stream: int,
        first: int,
        length: int,
    ) -> None:
        """out (...,K) <- x (...,K), samples (B,) int32, residual (...,K) or None: keep x / (1 - rate) + residual."""

    def embedding_backward(self, d_weight: Ref | None, /, d_res: Ref, tokens: Ref) -> None:
        """d_weight (Vp,C) <- d_res (B,T,C), tokens (B,T) int32."""

    def embedding_forward(self, res: Ref | None, /, tokens: Ref, weight: Ref) -> None:
        """res (B,T,C) <- tokens (B,T) int32, weight (Vp,C)."""

    def embedding_noise(
        self, out: Ref | None, /, res: Ref, samples: Ref, *, alpha: float, seed: int, stream: int
    ) -> None:
        """out (B,T,C) <- res (B,T,C), samples (B,) int32: res + u alpha / sqrt(T C), u uniform in [-1, 1)."""

    def grad_scale(
        self,
        norm: Ref | None,
        scale: Ref | None,
        apply: Ref | None,
        /,
        partials: Ref,
        loss_total: Ref,
        num_tokens: Ref,
        *,
        grad_clip: float,
    ) -> None:
        """norm (1,), scale (1,), apply (1,) <- partials (P,) sums of squares, loss_total (1,), num_tokens (1,)."""

    def importance(
        self,
        new_sensitivity: Ref | None,
        new_uncertainty: Ref | None,
        /,
        sensitivity: Ref,
        uncertainty: Ref,
        weight: Ref,
        grad: Ref,
        scale: Ref,
        apply: Ref,
        *,
        beta_1: float,
        beta_2: float,
    ) -> None:
        """new_sensitivity, new_uncertainty <- those before, weight, grad (one shape), cells scale, apply (1,)."""

    def importance_sums(self, sums: Ref | None, /, sensitivity: Ref, uncertainty: Ref, *, of_columns: bool) -> None:
        """sums <- sensitivity times uncertainty (N,R): (P,R), of each column of 128 rows, or (N,), of each row."""

    def last_norm_scale(
        self,
        new_last_norm: Ref | None,
        scale: Ref | None,
        apply: Ref | None,
        /,
        norm: Ref,
        last_norm: Ref,
        loss_total: Ref,
        num_tokens: Ref,
        *,
        grad_clip: float,
    ) -> None:
        """new_last_norm, scale, apply (1,) <- norm and last_norm of steps before, loss_total, num_tokens (1,)."""

    def linear_dgrad(
        self, d_x: Ref | None, /, d_y: Ref, weight: Ref, residual: Ref | None, *, alpha: float = 1.0
    ) -> None:
        """d_x (...,K) <- d_y (...,N), weight (N,K), residual (...,K) or None: alpha d_y weight + residual."""

    def linear_forward(
        self, y: Ref | None, /, x: Ref, weight: Ref, bias: Ref | None, residual: Ref | None, *, alpha: float = 1.0
    ) -> None:
        """y (...,N) <- x (...,K), weight (N,K), bias (N,) or None, residual (...,N) or None: alpha x W^T + both."""

    def linear_wgrad(self, d_weight: Ref | None, /, d_y: Ref, x: Ref, *, alpha: float = 1.0) -> None:
        """d_weight (N,K) <- d_y (...,N), x (...,K): alpha d_y^T x, a sum over all leading axes."""

    def loss_sum(self, loss_total: Ref | None, num_tokens: Ref | None, /, loss: Ref, targets: Ref) -> None:
        """loss_total (1,), num_tokens (1,) <- loss (...), targets (...) int32: sum of losses, number of trained."""

    def low_rank_backward(
        self, d_low: Ref | None, d_up: Ref | None, /, d_y: Ref, low: Ref, up: Ref, *, alpha: float = 1.0
    ) -> None:
        """d_low (...,R), d_up (N,R) <- d_y (...,N), low (...,R), up (N,R): alpha d_y up, alpha d_y^T low."""

    def nest(self, out: Ref | None, /, absmax: Ref, *, group: int, borders: tuple[int, ...]) -> None:
        """out (bytes,) uint8, as `Nested(group)` lays them out, <- absmax (n,) f32, the scales of NF4's blocks."""

    def orthogonality(
        self, coefficient: Ref | None, /, gram: Ref, targets: Ref, *, weight: float, first: int, present: int
    ) -> None:
        """coefficient (R,S) <- gram (S,S), targets (B,T): what gives the gradient of a matrix, by its products."""

    def output_gain(
        self,
        gain: Ref | None,
        norm: Ref | None,
        /,
        weight: Ref | None,
        through: Ref | None,
        gram: Ref | None,
        up: Ref | None,
        magnitude: Ref | None,
        *,
        scale: float,
        first: int,
    ) -> None:
        """gain (N,), norm (N,) <- weight (N,K), through = weight A^T (N,S), gram = A A^T (S,S), up (N,R), magnitude."""

    def output_gain_backward(self, d_magnitude: Ref | None, /, d_gain: Ref, norm: Ref | None) -> None:
        """d_magnitude (N,) <- d_gain (N,), norm (N,) or None: d_gain / norm, which passes no gradient."""

    def penalize(
        self, out: Ref | None, new_seen: Ref | None, /, logits: Ref, seen: Ref, tokens: Ref, *, penalty: float
    ) -> None:
        """out (B,1,Vp), new_seen (B,Vp) int32 <- logits (B,1,Vp), seen (B,Vp) int32, tokens (B,1) int32."""

    def qk_norm_backward(
        self,
        d_qkv: Ref | None,
        d_q_weight: Ref | None,
        d_k_weight: Ref | None,
        /,
        d_out: Ref,
        qkv: Ref,
        q_weight: Ref,
        k_weight: Ref,
        rstd: Ref,
        *,
        num_heads: int,
        num_kv_heads: int,
    ) -> None:
        """d_qkv (B,T,(Hq+2Hkv)*Hd), d_q_weight (Hd,), d_k_weight (Hd,) <- d_out, qkv like d_qkv, weights, rstd."""

    def qk_norm_forward(
        self,
        out: Ref | None,
        rstd: Ref | None,
        /,
        qkv: Ref,
        q_weight: Ref,
        k_weight: Ref,
        *,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
    ) -> None:
        """out (B,T,(Hq+2Hkv)*Hd), rstd (B,T,Hq+Hkv) <- qkv like out, q_weight (Hd,), k_weight (Hd,)."""

    def quantization_error(self, new_error: Ref | None, /, error: Ref, x: Ref, copy: Ref) -> None:
        """new_error (6,) <- error (6,), x (any shape), its `copy` in fp8 rows (the same shape)."""

    def quantize(self, out: Ref | None, scale: Ref | None, /, x: Ref, *, limit: float) -> None:
        """out, in every wanted form with its scales (`llmq.operands.own_scales`), and scale (1,) <- x (like out)."""

    def reduce_scatter(self, out: Ref | None, /, x: Ref, *, bounds: tuple[int, ...]) -> None:
        """out (n,K), these rows of x <- x (...,K): the sum over ranks, in order, of this rank's rows."""

    def repeat(self, out: Ref | None, /, block: Ref, *, first: int) -> None:
        """out (any shape) <- block (n,): its flat element i is element (first + i) mod n of the block."""

    def rmsnorm_backward(
        self, d_out: Ref | None, d_weight: Ref | None, /, d_x: Ref, d_res: Ref | None, res: Ref, weight: Ref, rstd: Ref
    ) -> None:
        """d_out (B,T,C), d_weight (C,) <- d_x (B,T,C), d_res (B,T,C) or None, res (B,T,C), weight (C,), rstd (B,T)."""

    def rmsnorm_forward(self, x: Ref | None, rstd: Ref | None, /, res: Ref, weight: Ref, *, eps: float) -> None:
        """x (B,T,C), rstd (B,T) <- res (B,T,C), weight (C,)."""

    def rope_backward(
        self, d_qkv: Ref | None, /, d_out: Ref, table: Ref, positions: Ref, *, num_heads: int, num_kv_heads: int
    ) -> None:
        """d_qkv (B,T,(Hq+2Hkv)*Hd) <- d_out like d_qkv, table (max_T,Hd), positions (B,T): the turn backwards."""

    def rope_forward(
        self, out: Ref | None, /, qkv: Ref, table: Ref, positions: Ref, *, num_heads: int, num_kv_heads: int
    ) -> None:
        """out (B,T,(Hq+2Hkv)*Hd) <- qkv like out, table (max_T,Hd) cos | sin, positions (B,T) int32."""

    def sample(
        self,
        next_tokens: Ref | None,
        next_positions: Ref | None,
        /,
        logits: Ref,
        positions: Ref,
        samples: Ref,
        *,
        vocab_size: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
    ) -> None:
        """next_tokens, next_positions (B,1) int32 <- logits (B,1,Vp), positions (B,1) int32, samples (B,) int32."""

    def scale_columns_backward(self, d_x: Ref | None, d_gain: Ref | None, /, d_y: Ref, x: Ref, gain: Ref) -> None:
        """d_x (...,N), d_gain (N,) <- d_y (...,N), x (...,N), gain (N,): gain d_y, and the sum of d_y x over rows."""

    def scale_columns_forward(
        self, y: Ref | None, /, x: Ref, gain: Ref, bias: Ref | None, residual: Ref | None
    ) -> None:
        """y (...,N) <- x (...,N), gain (N,), bias (N,) or None, residual (...,N) or None: gain x + bias + residual."""

    def scale_update(
        self,
        new_scale: Ref | None,
        new_history: Ref | None,
        new_amax: Ref | None,
        /,
        scale: Ref,
        history: Ref,
        amax: Ref,
        limits: Ref,
        apply: Ref,
    ) -> None:
        """new_scale (N,), new_history (H,N), new_amax (N,) <- scale, amax, limits (N,), history (H,N), apply (1,)."""

    def sgd(
        self,
        new_master: Ref | None,
        new_m: Ref | None,
        weight: Ref | None,
        /,
        master: Ref,
        m: Ref | None,
        grad: Ref,
        scale: Ref,
        apply: Ref,
        learning_rate: Ref,
        step: Ref,
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        seed: int,
        stream: int,
        first: int = 0,
        rate: float = 1.0,
    ) -> None:
        """new_master, new_m, weight <- master, m, grad (one shape; no m without momentum); the other four are (1,)."""

    def sum_pieces(self, out: Ref | None, /, own: Ref, pieces: Ref | None, *, rank: int) -> None:
        """out (n,K) <- own (n,K), pieces (R-1,m,K) or None: f32 sum of n rows of each, own in place `rank`."""

    def sum_squares(self, partials: Ref | None, /, grad: Ref) -> None:
        """partials (P,) <- grad (any shape), P = ceil(rows / 128) over its flattened leading axes, 1 for a vector."""

    def swiglu_backward(self, d_gate_up: Ref | None, /, d_act: Ref, gate_up: Ref) -> None:
        """d_gate_up (B,T,2F) <- d_act (B,T,F), gate_up (B,T,2F)."""

    def swiglu_forward(self, act: Ref | None, /, gate_up: Ref) -> None:
        """act (B,T,F) <- gate_up (B,T,2F)."""

    def swiglu_low_rank_backward(
        self,
        d_gate_up: Ref | None,
        d_gate_low: Ref | None,
        d_up_low: Ref | None,
        d_gate_b: Ref | None,
        d_up_b: Ref | None,
        /,
        d_act: Ref,
        gate_up: Ref,
        gate_low: Ref,
        up_low: Ref,
        gate_b: Ref,
        up_b: Ref,
        *,
        gate_alpha: float,
        up_alpha: float,
    ) -> None:
        """`swiglu_backward`, and `low_rank_backward` of the gradient's halves."""

    def token_linear(
        self,
        y: Ref | None,
        /,
        x: Ref,
        norm: Ref | None,
        weight: Ref,
        bias: Ref | None,
        residual: Ref | None,
        *,
        eps: float,
        gated: bool,
    ) -> None:
        """y (B,1,N) <- x (B,1,K), norm (K,) or None, weight (N,K), bias (N,) or None, residual (B,1,N) or None."""

    def virtual_tokens_backward(
        self, d_x: Ref | None, d_virtual: Ref | None, /, d_out: Ref, positions: Ref, *, num_virtual: int, channels: int
    ) -> None:
        """d_x (B,T,W), d_virtual (N,D) <- d_out (B,T,W), positions (B,T) int32."""

    def virtual_tokens_forward(
        self, out: Ref | None, /, x: Ref, virtual: Ref, positions: Ref, *, num_virtual: int, channels: int
    ) -> None:
        """out (B,T,W) <- x (B,T,W), virtual (N,D), positions (B,T) int32."""

    # end of ops
