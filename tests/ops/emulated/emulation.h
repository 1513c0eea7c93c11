// CUDA's language on a CPU, as far as the kernels in cuda/ use it: what they compute can be tested where there is no GPU.
//
// A thread is a fiber with a stack of its own; it runs until it waits for others (a barrier, a shuffle) and then hands on to
// the next thread of its block. Blocks run one after the other, those of a cluster beside each other, each on a thread of
// the operating system, so that `__shared__` is storage of that thread. Nothing is concurrent within a block: races are not
// found (compute-sanitizer finds them on a GPU), wrong indices, rounding and missing parts are.
//
// Numbers: fused products only where the source says fmaf, conversions as PTX defines them, approximate functions exact.

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <atomic>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)

namespace emulation {

constexpr size_t STACK_BYTES = 128 << 10;
constexpr int NAMED_BARRIERS = 16;

struct Index {
    unsigned x, y, z;
};

// Opens when as many have come as are needed.
struct Barrier {
    int arrived = 0;
    unsigned generation = 0;
    void open() { arrived = 0, generation++; }
};

struct Warp {
    Barrier barrier;
    int live = 0;
    unsigned round = 0;
    uint64_t slots[2][32];
};

// A copy in the background, and the group of its thread's copies that it belongs to.
struct Copy {
    char* to;
    const void* from;
    int bytes;
    unsigned group;
};

struct Fiber {
    Index thread;
    unsigned number;
    bool done = false, begun = false;
    unsigned rounds = 0;  // of exchanges within the warp, which alternate between two sets of slots
    unsigned phase = 0;   // of the cluster's barrier, when this thread came to it
    unsigned group = 0;   // of copies: how many were committed
    std::vector<Copy> copies;  // not waited for yet
    ucontext_t start;
    jmp_buf at;
    std::unique_ptr<char[]> stack;
};

struct Cluster {
    explicit Cluster(unsigned size, size_t shared) : size(size), dynamic(size), statics(size), live(0) {
        for (auto& memory : dynamic) memory.assign(shared + 256, 0xff);
    }
    unsigned size;
    std::vector<std::vector<unsigned char>> dynamic;
    std::vector<char*> statics;  // of each block: where its `__shared__` storage lies
    std::atomic<int> live, arrived{0};
    std::atomic<unsigned> generation{0}, begun{0};
    std::atomic<const char*> failure{nullptr};
    void check() {
        int all = live.load();
        if (all > 0 && arrived.compare_exchange_strong(all, 0)) generation++;
    }
};

struct Block {
    Index block, grid, size;
    unsigned rank = 0;
    Cluster* cluster = nullptr;
    int live = 0, counted = 0, count = 0;
    Barrier all, named[NAMED_BARRIERS];
    std::vector<Warp> warps;
    std::vector<Fiber> fibers;
    unsigned running = 0;
    jmp_buf scheduler;
    void (*kernel)(void**) = nullptr;
    void** arguments = nullptr;
    Fiber& fiber() { return fibers[running]; }
    Warp& warp() { return warps[running / 32]; }
};

extern __thread Block* block;
static thread_local char marker[16];  // offsets from here to `__shared__` storage are the same in every thread

// Ends the launch; the caller is told.
[[noreturn]] void fail(const char* what);
// Lets the next thread of the block run.
void hand_on();
void wait(Barrier& barrier, int needed);
// Runs a whole grid; null, or what went wrong. `marker` gives that of the library of the kernel.
const char* launch(const unsigned* grid, unsigned threads, size_t shared, unsigned size, void (*kernel)(void**),
                   void** arguments, char* (*marker)());

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}
template <class... A>
void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}

inline void* dynamic_shared() {
    uintptr_t at = reinterpret_cast<uintptr_t>(block->cluster->dynamic[block->rank].data());
    return reinterpret_cast<void*>((at + 127) & ~static_cast<uintptr_t>(127));
}

// what every lane of the warp gives to all of them
template <class T>
const uint64_t* exchange(T own) {
    static_assert(sizeof(T) <= 8, "a word of the exchange");
    Warp& warp = block->warp();
    Fiber& fiber = block->fiber();
    uint64_t* slots = warp.slots[fiber.rounds++ % 2];
    memcpy(&slots[fiber.number % 32], &own, sizeof(T));
    wait(warp.barrier, warp.live);
    return slots;
}
template <class T>
T taken(const uint64_t* slots, unsigned lane) {
    T value;
    memcpy(&value, &slots[lane], sizeof(T));
    return value;
}
inline unsigned lane() { return block->fiber().number % 32; }

template <class To, class From>
To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same number of bits");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

template <class P>
uint32_t* words(P at, int count) {
    uintptr_t number = (uintptr_t)at;
    if (number % (4 * count)) fail("a vector access that is not aligned");
    return reinterpret_cast<uint32_t*>(number);
}

// An address in shared memory has 32 bits: the block's rank, whether it is of static storage, and an offset.
constexpr uint32_t STATIC = 1u << 27, MIDDLE = 1u << 26;
inline uint32_t shared_address(const void* own) {
    ptrdiff_t dynamic = static_cast<const char*>(own) - static_cast<const char*>(dynamic_shared());
    bool inside = dynamic >= 0 && dynamic < static_cast<ptrdiff_t>(block->cluster->dynamic[block->rank].size());
    ptrdiff_t offset = inside ? dynamic : static_cast<const char*>(own) - marker;
    return block->rank << 28 | (inside ? 0 : STATIC) | (static_cast<uint32_t>(offset + MIDDLE) & (STATIC - 1));
}
inline char* of_cluster(uint32_t address) {
    Cluster& cluster = *block->cluster;
    unsigned rank = address >> 28;
    ptrdiff_t offset = static_cast<ptrdiff_t>(address & (STATIC - 1)) - MIDDLE;
    if (address & STATIC) return cluster.statics[rank] + offset;
    uintptr_t at = reinterpret_cast<uintptr_t>(cluster.dynamic[rank].data());
    return reinterpret_cast<char*>((at + 127) & ~static_cast<uintptr_t>(127)) + offset;
}

inline uint16_t to_bf16(float x) {
    uint32_t u = bits<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// x rounded to nearest even in a format of 8 bits, saturated; NaN is `nan`
inline uint8_t to_fp8(float x, int mantissa, int bias, float largest, uint8_t nan) {
    uint32_t sign = bits<uint32_t>(x) >> 24 & 0x80;
    float size = fabsf(x);
    if (size != size) return nan;
    int exponent;
    frexpf(size, &exponent);
    exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;
    float step = ldexpf(1.0f, exponent - mantissa), rounded = rintf(size / step) * step;
    if (rounded > largest) rounded = largest;
    if (rounded == 0) return static_cast<uint8_t>(sign);
    frexpf(rounded, &exponent);
    exponent -= 1;
    bool normal = exponent >= 1 - bias;
    int shift = (normal ? exponent : 1 - bias) - mantissa;
    uint32_t units = static_cast<uint32_t>(ldexpf(rounded, -shift));
    uint32_t field = normal ? (static_cast<uint32_t>(exponent + bias) << mantissa) + (units - (1u << mantissa)) : units;
    return static_cast<uint8_t>(sign | field);
}
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

}  // namespace emulation

#define threadIdx (emulation::block->fiber().thread)
#define blockIdx (emulation::block->block)
#define blockDim (emulation::block->size)
#define gridDim (emulation::block->grid)

inline void __syncthreads() { emulation::wait(emulation::block->all, emulation::block->live); }
inline int __syncthreads_count(int yes);
inline int __syncthreads_or(int yes) { return __syncthreads_count(yes) != 0; }
inline int __syncthreads_count(int yes) {
    emulation::Block& own = *emulation::block;
    own.count += yes != 0;
    __syncthreads();
    int found = own.count;
    __syncthreads();
    own.count = 0;
    __syncthreads();
    return found;
}
inline void __syncwarp(unsigned = 0xffffffffu) { emulation::exchange(0); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <class T>
T __shfl_xor_sync(unsigned, T own, int step) {
    return emulation::taken<T>(emulation::exchange(own), emulation::lane() ^ step);
}
template <class T>
T __shfl_sync(unsigned, T own, int from) {
    return emulation::taken<T>(emulation::exchange(own), from & 31);
}
template <class T>
T __shfl_up_sync(unsigned, T own, int step) {
    const uint64_t* slots = emulation::exchange(own);
    int from = static_cast<int>(emulation::lane()) - step;
    return from < 0 ? own : emulation::taken<T>(slots, from);
}
template <class T>
unsigned __match_any_sync(unsigned, T own) {
    const uint64_t* slots = emulation::exchange(own);
    unsigned found = 0;
    for (unsigned lane = 0; lane < 32; lane++) found |= (emulation::taken<T>(slots, lane) == own) << lane;
    return found;
}
inline unsigned __ballot_sync(unsigned, bool own) {
    const uint64_t* slots = emulation::exchange(own);
    unsigned found = 0;
    for (unsigned lane = 0; lane < 32; lane++) found |= static_cast<unsigned>(emulation::taken<bool>(slots, lane)) << lane;
    return found;
}
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return out;
}
inline unsigned __float_as_uint(float x) { return emulation::bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulation::bits<float>(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline size_t __cvta_generic_to_global(const void* at) { return reinterpret_cast<size_t>(at); }
inline size_t __cvta_generic_to_shared(const void* at) { return emulation::shared_address(at); }
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
    std::common_type_t<A, B> x = a, y = b;
    return x < y ? y : x;
}
template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
    std::common_type_t<A, B> x = a, y = b;
    return y < x ? y : x;
}
template <class T, class V>
T atomicAdd(T* at, V value) {
    return __atomic_fetch_add(at, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
template <class T, class V>
T atomicMax(T* at, V value) {
    T old = __atomic_load_n(at, __ATOMIC_SEQ_CST), next = static_cast<T>(value);
    while (old < next && !__atomic_compare_exchange_n(at, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return old;
}
template <class T, class V>
T atomicExch(T* at, V value) {
    return __atomic_exchange_n(at, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
    unsigned old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(at, &old, old >= last ? 0 : old + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return old;
}

// One function for each instruction in assembly, its outputs first.
namespace ptx {
inline void griddepcontrol_launch_dependents() {}  // kernels run one after the other
inline void griddepcontrol_wait() {}
inline void mov_u32(unsigned& rank) { rank = emulation::block->rank; }
inline void barrier_cluster_arrive_release_aligned() {
    emulation::Cluster& cluster = *emulation::block->cluster;
    emulation::block->fiber().phase = cluster.generation;
    cluster.arrived++;
    cluster.check();
}
inline void barrier_cluster_wait_acquire_aligned() {
    while (emulation::block->cluster->generation == emulation::block->fiber().phase) emulation::hand_on();
}
inline void mapa_shared__cluster_u32(unsigned& there, unsigned here, unsigned rank) {
    there = (here & ((1u << 28) - 1)) | rank << 28;
}
template <class T>
void far_store(unsigned at, T value) {
    memcpy(emulation::of_cluster(at), &value, sizeof(T));
}
inline void st_shared__cluster_f32(unsigned at, float value) { far_store(at, value); }
inline void bar_sync(int number, int count) { emulation::wait(emulation::block->named[number], count); }
template <class P>
void ld_global_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, P at) {
    uint32_t* from = emulation::words(at, 4);
    a = from[0], b = from[1], c = from[2], d = from[3];
}
template <class P>
void ld_global_cg_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, P at) {
    ld_global_v4_u32(a, b, c, d, at);
}
template <class P>
void ld_global_cg_u32(unsigned& a, P at) {
    a = *emulation::words(at, 1);
}
template <class P>
void prefetch_global_L2(P at) {
    emulation::words(at, 1);
}
// The copy is made when it is waited for; until then what is there is neither old nor new.
template <class P>
void cp_async_ca_shared_global(unsigned to, P from, int bytes) {
    emulation::Fiber& own = emulation::block->fiber();
    own.copies.push_back({emulation::of_cluster(to), emulation::words(from, bytes / 4), bytes, own.group});
    memset(own.copies.back().to, 0xff, bytes);
}
template <class P>
void cp_async_cg_shared_global(unsigned to, P from, int bytes) {
    cp_async_ca_shared_global(to, from, bytes);
}
template <class P>
void cp_async_cg_shared_global(unsigned to, P from, int bytes, int given) {  // zeros beyond what is given: here all or none
    if (given) return cp_async_ca_shared_global(to, from, bytes);
    static const char zeros[16] = {};
    cp_async_ca_shared_global(to, zeros, bytes);
}
// lane l has the address of row l % 8 of matrix l / 8
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned at) {
    if (emulation::block->warp().live < 32) emulation::fail("matrices are read by a whole warp");
    const uint64_t* slots = emulation::exchange(at);
    unsigned lane = emulation::lane(), *out[4] = {&a, &b, &c, &d};
    for (unsigned matrix = 0; matrix < 4; matrix++)
        *out[matrix] = emulation::words(emulation::of_cluster(emulation::taken<unsigned>(slots, 8 * matrix + lane / 4)), 4)[lane % 4];
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned at) {
    if (emulation::block->warp().live < 32) emulation::fail("matrices are read by a whole warp");
    const uint64_t* slots = emulation::exchange(at);
    unsigned lane = emulation::lane(), *out[4] = {&a, &b, &c, &d};
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        *out[matrix] = 0;
        for (unsigned i = 0; i < 2; i++) {
            char* row = emulation::of_cluster(emulation::taken<unsigned>(slots, 8 * matrix + lane % 4 * 2 + i));
            *out[matrix] |= (emulation::words(row, 4)[lane / 8] >> lane / 4 % 2 * 16 & 0xffffu) << 16 * i;
        }
    }
}
// d (16,8) += a (16,16) b (16,8): lane 4 r + c has numbers 2 c and 2 c + 1 of rows r and r + 8 of d and a, of column r of b
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                                unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                                unsigned b1) {
    if (emulation::block->warp().live < 32) emulation::fail("matrices are multiplied by a whole warp");
    float rows[2][16], columns[2][16];
    unsigned lane = emulation::lane(), own[6] = {a0, a1, a2, a3, b0, b1};
    auto take = [&](const uint64_t* slots, unsigned first, float* to) {
        for (unsigned i = 0; i < 8; i++) {
            uint32_t bits = (emulation::taken<unsigned>(slots, first + i / 2) >> i % 2 * 16 & 0xffffu) << 16;
            memcpy(&to[i], &bits, 4);
        }
    };
    for (unsigned word = 0; word < 6; word++) {
        const uint64_t* slots = emulation::exchange(own[word]);
        if (word < 4) take(slots, lane / 4 * 4, rows[word % 2] + word / 2 * 8);
        for (unsigned n = 0; word >= 4 && n < 2; n++) take(slots, (lane % 4 * 2 + n) * 4, columns[n] + word % 2 * 8);
    }
    float* sums[4] = {&d0, &d1, &d2, &d3};
    for (unsigned i = 0; i < 4; i++) {
        double sum = *sums[i];
        for (unsigned k = 0; k < 16; k++) sum += double(rows[i / 2][k]) * columns[i % 2][k];
        *sums[i] = static_cast<float>(sum);
    }
}
inline void cp_async_commit_group() { emulation::block->fiber().group++; }
inline void cp_async_wait_group(unsigned under_way) {
    emulation::Fiber& own = emulation::block->fiber();
    auto copy = own.copies.begin();
    for (; copy != own.copies.end() && own.group - copy->group > under_way; copy++) memcpy(copy->to, copy->from, copy->bytes);
    own.copies.erase(own.copies.begin(), copy);
}
template <class P>
void st_global_v4_u32(P at, unsigned a, unsigned b, unsigned c, unsigned d) {
    uint32_t* to = emulation::words(at, 4);
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
}
template <class P>
void st_global_v2_u32(P at, unsigned a, unsigned b) {
    uint32_t* to = emulation::words(at, 2);
    to[0] = a, to[1] = b;
}
inline void cvt_rn_bf16_f32(unsigned short& out, float x) { out = emulation::to_bf16(x); }
inline void cvt_rn_bf16x2_f32(unsigned& out, float high, float low) {
    out = static_cast<unsigned>(emulation::to_bf16(high)) << 16 | emulation::to_bf16(low);
}
inline void cvt_rn_satfinite_e4m3x2_f32(unsigned short& out, float high, float low) {
    auto one = [](float x) { return emulation::to_fp8(x, 3, 7, 448.0f, 0x7f); };
    out = static_cast<unsigned short>(one(high) << 8 | one(low));
}
inline void cvt_rn_satfinite_e5m2x2_f32(unsigned short& out, float high, float low) {
    auto one = [](float x) { return emulation::to_fp8(x, 2, 15, 57344.0f, 0x7f); };
    out = static_cast<unsigned short>(one(high) << 8 | one(low));
}
inline void max_NaN_xorsign_abs_bf16x2(unsigned& own, unsigned other) {  // own <- the larger of own and other
    auto one = [](unsigned a, unsigned b) {
        unsigned x = a & 0x7fff, y = b & 0x7fff;
        if (x > 0x7f80 || y > 0x7f80) return 0x7fffu;
        return (x < y ? y : x) | ((a ^ b) & 0x8000u);
    };
    own = one(own >> 16, other >> 16) << 16 | one(own & 0xffff, other & 0xffff);
}
inline void ex2_approx_ftz_f32(float& out, float x) { out = emulation::flushed(exp2f(emulation::flushed(x))); }
inline void rsqrt_approx_ftz_f32(float& out, float x) { out = emulation::flushed(1.0f / sqrtf(emulation::flushed(x))); }
inline void rcp_approx_ftz_f32(float& out, float x) { out = emulation::flushed(1.0f / emulation::flushed(x)); }
}  // namespace ptx

#define EMULATED(name)                                                                                      \
    extern "C" const char* emulated_##name(const unsigned* grid, unsigned threads, size_t shared, unsigned cluster, \
                                           void** arguments) {                                                  \
        return emulation::launch(                                                                               \
            grid, threads, shared, cluster, [](void** given) { emulation::call(name, given); }, arguments,      \
            [] { return emulation::marker; });                                                                  \
    }
