// What ranks have sent this one, added up in f32 in the order of ranks, with its own in its place among them; see the
// reference. Memory-bound: each number is read and written once. Pieces in e4m3 have a scale for each tile of 128 x 128.
//
// Architectures: 80 86 89 90 100 120
// Constants: O, X, P (dtypes of the sum, of this rank's own, of the others' pieces), C (columns), N

#include "common.cuh"

struct e4m3 {
    u8 bits;
};

// its bits, moved to where f32 has them, need only another exponent bias, which a product changes; a NaN stays one
__device__ __forceinline__ float to_float(e4m3 x) {
    u32 size = x.bits & 0x7f;
    float magnitude = size == 0x7f ? __uint_as_float(0x7fc00000u) : __uint_as_float(size << 20) * 0x1p120f;
    return x.bits & 0x80 ? -magnitude : magnitude;
}

#include "constants"

constexpr int SIDE = 128, SCALES = (C + 4 * SIDE - 1) / (4 * SIDE) * 4;  // scales of a row of tiles

// v <- N numbers of the pieces from `at` on, which are all in one tile
template <typename T>
__device__ __forceinline__ void load_piece(const T* pieces, const float*, i64 at, float (&v)[N]) {
    load(pieces + at, v);
}
__device__ __forceinline__ void load_piece(const e4m3* pieces, const float* scale, i64 at, float (&v)[N]) {
    const u32* words = reinterpret_cast<const u32*>(pieces + at);
    float unit = scale[at / C / SIDE * SCALES + at % C / SIDE];
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = to_float(e4m3{static_cast<u8>(words[j / 4] >> 8 * (j % 4))}) * unit;
}

// out (count,) <- own (count,), `others` pieces that lie `apart`, of which `count` numbers count; added to what is there
// with `accumulate`. out may be own.
extern "C" __global__ void __launch_bounds__(256)
    sum_pieces(O* out, const X* own, const P* pieces, const float* scale, i64 count, i64 apart, int others, int rank,
               int accumulate) {
    i64 step = static_cast<i64>(gridDim.x) * 256 * N;
    for (i64 at = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * N; at < count; at += step) {
        float total[N], mine[N], other[N];
        load(own + at, mine);
        for (int piece = 0; piece <= others; piece++) {
            if (piece != rank) load_piece(pieces, scale, (piece - (piece > rank)) * apart + at, other);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float x = piece == rank ? mine[j] : other[j];
                total[j] = piece ? total[j] + x : x;
            }
        }
        if (accumulate) {
            load(static_cast<const O*>(out) + at, other);
#pragma unroll
            for (int j = 0; j < N; j++) total[j] = other[j] + total[j];
        }
        store(out + at, total);
    }
}
