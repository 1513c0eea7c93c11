// Rotary embedding of query and key heads as transformers has them, apart and perhaps strided, with cos and sin of every
// channel, whose halves are equal: out1 = x1 cos - x2 sin, out2 = x2 cos + x1 sin. In place if out is x.
//
// A thread owns N channels of both halves of a head in one row of tokens.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, HQ, HKV, HD, N, SIGN (1, or -1 to turn back); elements from a token and from a head to the next of what is
// written and read, OUT_Q_ROW OUT_Q_HEAD OUT_K_ROW OUT_K_HEAD Q_ROW Q_HEAD K_ROW K_HEAD

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256, HALF = HD / 2, PER_HEAD = HALF / N, UNITS = (HQ + HKV) * PER_HEAD;
static_assert(HALF % N == 0, "an access stays within half a head");

// `batch` numbers lie from the first token of a sequence to that of the next, in the tensors in order; 0 of angles that all
// sequences share
extern "C" __global__ void __launch_bounds__(THREADS)
    rope_heads(T* out_q, T* out_k, const T* q, const T* k, const T* cos, const T* sin, i64 out_q_batch, i64 out_k_batch,
               i64 q_batch, i64 k_batch, i64 angle_batch, int rows, int length) {
    i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    int row = static_cast<int>(index / UNITS), unit = static_cast<int>(index % UNITS);
    if (row >= rows) return;
    int sequence = row / length, token = row % length, head = unit / PER_HEAD, channel = unit % PER_HEAD * N;
    bool is_q = head < HQ;
    if (!is_q) head -= HQ;
    const T* x = is_q ? q + sequence * q_batch + static_cast<i64>(token) * Q_ROW + head * Q_HEAD
                      : k + sequence * k_batch + static_cast<i64>(token) * K_ROW + head * K_HEAD;
    T* out = is_q ? out_q + sequence * out_q_batch + static_cast<i64>(token) * OUT_Q_ROW + head * OUT_Q_HEAD
                  : out_k + sequence * out_k_batch + static_cast<i64>(token) * OUT_K_ROW + head * OUT_K_HEAD;
    if (!(is_q ? out_q : out_k)) return;
    i64 angle = sequence * angle_batch + static_cast<i64>(token) * HD + channel;
    float a[N], b[N], c[N], s[N];
    load(x + channel, a), load(x + channel + HALF, b);
    load(cos + angle, c), load(sin + angle, s);
#pragma unroll
    for (int j = 0; j < N; j++) {
        float x1 = a[j], x2 = b[j], turn = SIGN * s[j];
        a[j] = x1 * c[j] - x2 * turn;
        b[j] = x2 * c[j] + x1 * turn;
    }
    store(out + channel, a), store(out + channel + HALF, b);
}
