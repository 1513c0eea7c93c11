// Products of R terms, or to R columns, on tensor cores: what the kernels of adapters share. R is 16 or 32.

constexpr int PAIRS = R / 16;  // of blocks of 8 columns

// 16 bytes from global to shared memory, in the background; zeros where there are none
__device__ __forceinline__ void copy(u32 to, const bf16* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "n"(16),
                 "r"(there ? 16 : 0)
                 : "memory");
}

// Where 16 bytes of a row lie in shared memory: 8 rows that are read together lie in distinct banks. Rows that are 16 apart
// lie alike, and an even number of pieces further on is an exclusive or.
template <int COLUMNS>
__device__ __forceinline__ int piece_at(int row, int piece) {
    return row * 2 * COLUMNS + (piece ^ row % 8) * 16;
}
__device__ __forceinline__ int low_at(int row, int piece) { return row * 2 * R + (piece ^ row / (64 / R) % (R / 8)) * 16; }

// 4 matrices of 8 x 8 numbers, lane l having the address of row l % 8 of matrix l / 8
__device__ __forceinline__ void load_rows(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void load_columns(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// sums (16,8) += a (16,16) b (16,8)
__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sums (16,R) += left (16,16) times 16 rows of R numbers in shared memory, of which this lane's lies at `own` + `row` rows
__device__ __forceinline__ void add_product(float (&sums)[R / 8][4], const u32 (&left)[4], u32 own, int row) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        u32 factor[4];
        load_columns(factor, (own ^ 32 * p) + 2 * R * row);
        multiply(sums[2 * p], left, factor[0], factor[1]);
        multiply(sums[2 * p + 1], left, factor[2], factor[3]);
    }
}

struct alignas(8) Pair {
    float a, b;
};

__device__ __forceinline__ void store_two(float* to, float a, float b) { *reinterpret_cast<Pair*>(to) = Pair{a, b}; }

// 8 numbers that bf16 holds exactly, to shared memory
__device__ __forceinline__ void keep(bf16* to, const float (&v)[8]) {
    Pack<bf16, 8> pack;
    pack.set(v);
    *reinterpret_cast<Words<4>*>(to) = Words<4>{pack.at[0], pack.at[1], pack.at[2], pack.at[3]};
}
