// Numbers in 8 bits with a scale for each 128 of a row, rounded stochastically, as llmq/ops/reference/eight_bits.py
// defines them. Included after common.cuh, before constants, which name its types.

constexpr int BLOCK = 128;  // numbers of a row under one scale (BLOCK in llmq/scaling.py)

struct e4m3 {
    u8 bits;
};
struct int8 {
    u8 bits;
};
struct uint8 {
    u8 bits;
};

template <typename S>
constexpr bool IS_CODED = sizeof(S) == 1;

// What codes stand for, how large the largest is, and the code of a magnitude that 16 random bits choose between its
// neighbours: `coded` keeps the mean, `coded_root` that of the square.
template <typename S>
struct Codes;

template <>
struct Codes<e4m3> {
    static constexpr float LIMIT = 448.0f;
    static constexpr u32 LARGEST = 0x7e, DROPPED = 20, BIAS = (127 - 7) << 3;
    static __device__ __forceinline__ float value(u32 code) {
        return __uint_as_float((code & 0x7f) << DROPPED | (code & 0x80) << 24) * 0x1p120f;
    }
    // the code below a magnitude whose bits are raised; small ones are moved to where numbers are as far apart as subnormal
    static __device__ __forceinline__ u32 below(float units, u32 raised) {
        bool is_small = units < 0x1p-6f;
        return ((__float_as_uint(is_small ? units + 0x1p-6f : units) + raised) >> DROPPED) - BIAS - (is_small ? 8 : 0);
    }
    static __device__ __forceinline__ u32 coded(float x, float inverse, u32 random) {
        return min(below(fabsf(x) * inverse, random << 4), LARGEST) | (__float_as_uint(x) >> 24 & 0x80);
    }
    static __device__ __forceinline__ u32 code_below(float units) { return below(units, 0); }
};

template <>
struct Codes<int8> {
    static constexpr float LIMIT = 127.0f;
    static __device__ __forceinline__ float value(u32 code) {
        return static_cast<float>(static_cast<signed char>(code));
    }
    static __device__ __forceinline__ u32 coded(float x, float inverse, u32 random) {
        int size = static_cast<int>(fminf(floorf(fabsf(x) * inverse + static_cast<float>(random) * 0x1p-16f), LIMIT));
        return static_cast<u32>(x < 0 ? -size : size) & 0xff;
    }
};

template <>
struct Codes<uint8> {
    static constexpr float LIMIT = 255.0f;
    static constexpr u32 LARGEST = 255;
    static __device__ __forceinline__ float value(u32 code) { return static_cast<float>(code); }
    static __device__ __forceinline__ u32 code_below(float units) { return static_cast<u32>(units); }
};

// the code of `root`, whose square is above 0 if `is_some`, by 16 random bits
template <typename S>
__device__ __forceinline__ u32 coded_root(float root, float inverse, u32 random, bool is_some) {
    float units = root * inverse;
    u32 code = Codes<S>::code_below(units);
    float low = Codes<S>::value(code), high = Codes<S>::value(code + 1);
    float chance = static_cast<float>(random) * 0x1p-16f * ((high - low) * (high + low));
    code = min(code + ((units - low) * (units + low) > chance ? 1u : 0u), Codes<S>::LARGEST);
    return is_some ? max(code, 1u) : code;
}

// N numbers of a moment in registers as they are stored: plain ones, or codes with the scale of their block.
template <typename S, int N, bool CODED = IS_CODED<S>>
struct Moment {
    Pack<S, N> pack;
    __device__ __forceinline__ void load(const S* from, const float*, i64 at, i64) { pack.load(from + at); }
    __device__ __forceinline__ void get(float (&v)[N]) const { pack.get(v); }
};

template <typename S, int N>
struct Moment<S, N, true> {
    u32 words[N / 4];
    float scale;
    __device__ __forceinline__ void load(const S* from, const float* scales, i64 at, i64 block) {
        Words<N / 4> piece = *reinterpret_cast<const Words<N / 4>*>(from + at);
#pragma unroll
        for (int i = 0; i < N / 4; i++) words[i] = piece.at[i];
        scale = scales[block];
    }
    __device__ __forceinline__ void get(float (&v)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = Codes<S>::value(words[i / 4] >> i % 4 * 8 & 0xff) * scale;
    }
};

// the smallest power of two that is not below a positive number
__device__ __forceinline__ float power_above(float x) {
    return __uint_as_float((__float_as_uint(x) + 0x7fffffu) & 0xff800000u);
}

// the largest of the magnitudes that the lanes of a block hold, which are neighbours; all lanes of the warp take part
template <int N>
__device__ __forceinline__ float block_amax(float x) {
    u32 most = __float_as_uint(x);
#pragma unroll
    for (int step = BLOCK / N / 2; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    return __uint_as_float(most);
}
