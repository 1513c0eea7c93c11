// How an optimizer stores its states: cut off or rounded stochastically to bf16, or in 8 bits with a scale for each 128
// numbers of a row. Included after constants, of which it reads N, the numbers that a lane owns at a time.

// x up or down by 16 random bits, to be cut off at bf16; infinities and NaN pass (the NaN of the GPU is 0x7fffffff)
__device__ __forceinline__ float raised(float x, u32 bits) {
    return x == x ? __uint_as_float(__float_as_uint(x) + bits) : x;
}

// the upper halves of v: bf16 numbers, of which the lower halves have to be cut off
__device__ __forceinline__ void store_cut(bf16* to, const float (&v)[N]) {
    Pack<bf16, N> pack;
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        pack.at[i] = __byte_perm(__float_as_uint(v[2 * i]), __float_as_uint(v[2 * i + 1]), 0x7632);
    pack.store(to);
}
__device__ __forceinline__ void store_cut(float* to, const float (&v)[N]) { store(to, v); }

template <typename S>
__device__ __forceinline__ void store_plain(S* to, i64 at, const float (&x)[N]) {
    if constexpr (!IS_CODED<S>) {
        if (to) store_cut(to + at, x);
    }
}

// A state as stored, by the random bits of its N numbers. ROOT: codes stand for the root, as of v; POWERS: scales are
// powers of two.
template <bool ROOT, bool POWERS, typename S>
__device__ __forceinline__ void store_moment(S* to, float* scales, i64 at, i64 block, const float (&x)[N],
                                             const u32 (&random)[N], bool in, bool is_first) {
    if constexpr (IS_CODED<S>) {
        float size[N], most = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            size[i] = ROOT ? sqrtf(x[i]) : x[i];
            most = fmaxf(most, fabsf(size[i]));
        }
        float scale = scale_of(block_amax<N>(most), Codes<S>::LIMIT, 1.0f);
        if (POWERS) scale = power_above(scale);
        float inverse = 1.0f / scale;
        u32 words[N / 4] = {};
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 code;
            if constexpr (ROOT)
                code = coded_root<S>(size[i], inverse, random[i], x[i] > 0);
            else
                code = Codes<S>::coded(x[i], inverse, random[i]);
            words[i / 4] |= code << i % 4 * 8;
        }
        if (!to || !in) return;
        store_words(to + at, words);
        if (is_first) scales[block] = scale;
    } else {
        float raised_up[N];
#pragma unroll
        for (int i = 0; i < N; i++) raised_up[i] = sizeof(S) == 2 ? raised(x[i], random[i]) : x[i];
        if (in) store_plain(to, at, raised_up);
    }
}
