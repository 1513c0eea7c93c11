// Rotary embedding of query and key heads as transformers has them, apart and perhaps strided, with cos and sin of every
// channel, whose halves are equal: out1 = x1 cos - x2 sin, out2 = x2 cos + x1 sin. In place if out is x.
//
// A thread owns N channels of both halves of a head in one row of tokens. Steps are in elements, from a sequence (0 of
// angles that all share), a token and a head to the next; as some follow from the length, none is a constant.
//
// Measured on an H100 in bf16 in a step of 8x1024, with strides as constants: 16 heads of 64 10.3 us and 32 of 128 43.4 us,
// 3250 and 3100 GB/s.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, HQ, HKV, HD, N, SIGN (1, or -1 to turn back)

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256, HALF = HD / 2, PER_HEAD = HALF / N, UNITS = (HQ + HKV) * PER_HEAD;
static_assert(HALF % N == 0, "an access stays within half a head");

extern "C" __global__ void __launch_bounds__(THREADS)
    rope_heads(T* out_q, T* out_k, const T* q, const T* k, const T* cos, const T* sin, i64 out_q_batch,
               i64 out_q_row, i64 out_q_head, i64 out_k_batch, i64 out_k_row, i64 out_k_head, i64 q_batch, i64 q_row,
               i64 q_head, i64 k_batch, i64 k_row, i64 k_head, i64 angle_batch, int rows, int length) {
    i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    int row = static_cast<int>(index / UNITS), unit = static_cast<int>(index % UNITS);
    if (row >= rows) return;
    int sequence = row / length, token = row % length, head = unit / PER_HEAD, channel = unit % PER_HEAD * N;
    bool is_q = head < HQ;
    if (!is_q) head -= HQ;
    const T* x = is_q ? q + sequence * q_batch + token * q_row + head * q_head
                      : k + sequence * k_batch + token * k_row + head * k_head;
    T* out = is_q ? out_q + sequence * out_q_batch + token * out_q_row + head * out_q_head
                  : out_k + sequence * out_k_batch + token * out_k_row + head * out_k_head;
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
