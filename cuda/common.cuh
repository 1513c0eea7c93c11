// Numbers, vectors of 16 bytes, and sums over a warp: what every kernel uses.
//
// bf16 is a plain 16-bit struct here: conversion up is a shift, conversion down one instruction from sm_80 on, and no CUDA
// header has to be found or compiled.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

template <typename T>
struct Narrow;
template <>
struct Narrow<float> {
    static __device__ __forceinline__ float from(float x) { return x; }
};
template <>
struct Narrow<bf16> {
    static __device__ __forceinline__ bf16 from(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};

// x rounded to nearest even in T
template <typename T>
__device__ __forceinline__ T narrow(float x) {
    return Narrow<T>::from(x);
}

template <int N>
struct __align__(4 * N) Words {
    u32 at[N];
};

// Stores to global memory of 16, 8 and 4 bytes as one instruction: of a structure's the compiler makes one per word. It does
// not know that memory changes, so that loads may be moved up across them: nothing reads what its own thread has stored.
__device__ __forceinline__ void store_words(void* to, const u32 (&at)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(at[0]), "r"(at[1]),
                 "r"(at[2]), "r"(at[3]));
}
__device__ __forceinline__ void store_words(void* to, const u32 (&at)[2]) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(at[0]), "r"(at[1]));
}
__device__ __forceinline__ void store_words(void* to, const u32 (&at)[1]) { *static_cast<u32*>(to) = at[0]; }

// N consecutive numbers of type T in registers, moved in pieces of up to 16 bytes; N * sizeof(T) is a power of two >= 4.
template <typename T, int N>
struct Pack {
    static constexpr int WORDS = N * sizeof(T) / 4, WIDE = WORDS < 4 ? WORDS : 4;
    static_assert(WORDS >= 1 && (WORDS & (WORDS - 1)) == 0, "a vector is 4, 8, 16 or more bytes");
    u32 at[WORDS];

    __device__ __forceinline__ void load(const T* from) {
#pragma unroll
        for (int i = 0; i < WORDS / WIDE; i++) {
            Words<WIDE> piece = reinterpret_cast<const Words<WIDE>*>(from)[i];
#pragma unroll
            for (int j = 0; j < WIDE; j++) at[i * WIDE + j] = piece.at[j];
        }
    }

    // EARLY: a load that is issued where it stands: the compiler moves others down to their use, to save registers
    template <bool EARLY>
    __device__ __forceinline__ void load_early(const T* from) {
        if constexpr (EARLY && WIDE == 4) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(at[i]), "=r"(at[i + 1]), "=r"(at[i + 2]), "=r"(at[i + 3])
                             : "l"(__cvta_generic_to_global(from + i * (4 / sizeof(T)))));
        } else {
            load(from);
        }
    }

    __device__ __forceinline__ void store(T* to) const {
#pragma unroll
        for (int i = 0; i < WORDS / WIDE; i++) {
            u32 piece[WIDE];
#pragma unroll
            for (int j = 0; j < WIDE; j++) piece[j] = at[i * WIDE + j];
            store_words(reinterpret_cast<u32*>(to) + i * WIDE, piece);
        }
    }

    __device__ __forceinline__ void get(float (&v)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if constexpr (sizeof(T) == 4)
                v[i] = __uint_as_float(at[i]);
            else
                v[i] = __uint_as_float(i % 2 ? at[i / 2] & 0xffff0000u : at[i / 2] << 16);
        }
    }

    __device__ __forceinline__ void set(const float (&v)[N]) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (sizeof(T) == 4)
                at[i] = __float_as_uint(v[i]);
            else
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(at[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
        }
    }
};

template <typename T, int N>
__device__ __forceinline__ void load(const T* from, float (&v)[N]) {
    Pack<T, N> pack;
    pack.load(from);
    pack.get(v);
}

template <typename T, int N>
__device__ __forceinline__ void store(T* to, const float (&v)[N]) {
    Pack<T, N> pack;
    pack.set(v);
    pack.store(to);
}

// weights of a norm, which multiply with what is added to them (1: Gemma's, which begin at 0)
template <int OFFSET, typename T, int N>
__device__ __forceinline__ void get_weights(const Pack<T, N>& from, float (&w)[N]) {
    from.get(w);
    if constexpr (OFFSET != 0) {
#pragma unroll
        for (int j = 0; j < N; j++) w[j] += OFFSET;
    }
}

template <int OFFSET, typename T, int N>
__device__ __forceinline__ void load_weights(const T* from, float (&w)[N]) {
    Pack<T, N> pack;
    pack.load(from);
    get_weights<OFFSET>(pack, w);
}

// asks for the 128 bytes around an address to be brought into L2
__device__ __forceinline__ void expect_line(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)));
}

// the sum over the WIDTH lanes around this one, the same in all of them
template <int WIDTH = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = WIDTH / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

__device__ __forceinline__ u32 warp_max(u32 x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// 1 / (1 + exp(-x)), right to |x| + 3 units of 2^-24 (expf and a division take 10 instructions more); exp overflows to
// infinity for very negative x, which gives the right 0
__device__ __forceinline__ float sigmoid(float x) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return inverse;
}

// A kernel may be launched early (`early` in llmq/ops/cuda/launch.py, from sm_90 on): it begins once every block of the one
// before it on the stream has called `let_next_begin` or is done. What any kernel before it writes, it reads after
// `await_previous` alone, and it writes nothing earlier. In a kernel that is launched otherwise both do nothing.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
