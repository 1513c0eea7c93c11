// An activation (llmq/ops/reference/gelu.py) of x in f32: Activated<ACTIVATION>(x) has its value and its slope().
//
// Each takes at most one ex2 and one rcp for both, so that kernels stay bound by memory. In PTX the value of gelu is 19
// instructions and that of gelu_tanh 8; with erff and tanhf they are 29 and 25.

#include "common.cuh"

constexpr int SILU = 0, GELU = 1, GELU_TANH = 2, RELU2 = 3;  // as in llmq/ops/cuda/activation.py

// Phi(-|x|) and exp(-x^2 / 2), right to 1.25 x^2 + 10 units of 2^-24: the quotient of the two is t P(t), t = 1 / (1 + 0.3 |x|),
// where P is fitted: up to |x| = 13 the quotient errs by less than 0.7 + x^2 / 4 units.
__device__ __forceinline__ void normal_tail(float x, float& tail, float& power) {
    float t;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(fabsf(x), 0.3f, 1.0f)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * x * -0.72134752f));
    float p = 0.0362379067f;
    p = fmaf(p, t, -0.159125835f), p = fmaf(p, t, 0.208814353f), p = fmaf(p, t, -0.055028975f), p = fmaf(p, t, 0.12870267f);
    p = fmaf(p, t, 0.100072369f), p = fmaf(p, t, 0.120691471f), p = fmaf(p, t, 0.119636059f);
    tail = p * t * power;
}

template <int ACTIVATION>
struct Activated;

template <>
struct Activated<SILU> {
    float s, value;
    __device__ __forceinline__ Activated(float x) : s(sigmoid(x)), value(s * x) {}
    __device__ __forceinline__ float slope() const { return s + value * (1.0f - s); }
};

template <>
struct Activated<GELU> {
    float x, power, p, value;  // p is Phi(x)
    __device__ __forceinline__ Activated(float given) : x(given) {
        float tail;
        normal_tail(x, tail, power);
        p = x < 0.0f ? tail : 1.0f - tail;
        value = x * p;
    }
    __device__ __forceinline__ float slope() const { return fmaf(x * 0.39894228f, power, p); }
};

template <>
struct Activated<GELU_TANH> {
    static constexpr float TWICE_C = 1.5957691f, CUBE = TWICE_C * 0.044715f;  // 2 sqrt(2 / pi)
    float square, s, value;  // (1 + tanh(u)) / 2 is sigmoid(2u)
    __device__ __forceinline__ Activated(float x) : square(x * x) {
        s = sigmoid(x * fmaf(square, CUBE, TWICE_C));
        value = s * x;
    }
    __device__ __forceinline__ float slope() const {
        return fmaf(value * (1.0f - s), fmaf(square, 3.0f * CUBE, TWICE_C), s);
    }
};

template <>
struct Activated<RELU2> {
    float positive, value;
    __device__ __forceinline__ Activated(float x) : positive(x < 0.0f ? 0.0f : x), value(positive * positive) {}  // NaN stays
    __device__ __forceinline__ float slope() const { return 2.0f * positive; }
};
