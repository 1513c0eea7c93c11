// The repetition penalty: out (B, VP) f32 and seen (B, VP) <- logits (B, VP), seen, and the token (B,) that is seen from now
// on. A positive logit of a seen token is divided by the penalty, another one multiplied with it. A thread has one logit.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, VP

#include "common.cuh"
#include "constants"

extern "C" __global__ void __launch_bounds__(256)
    penalize(float* out, int* new_seen, const T* logits, const int* seen, const int* tokens, float penalty) {
    int column = blockIdx.x * 256 + threadIdx.x;
    if (column >= VP) return;
    i64 at = static_cast<i64>(blockIdx.y) * VP + column;
    int mark = tokens[blockIdx.y] == column ? 1 : seen[at];
    float x = to_float(logits[at]);
    if (out) out[at] = mark == 0 ? x : x > 0 ? x / penalty : x * penalty;
    if (new_seen) new_seen[at] = mark;
}
