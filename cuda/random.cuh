// Random bits by address: Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), as in
// llmq/ops/reference/random.py. Included after common.cuh.

enum Purpose : u32 { MOMENTS = 0, OF_MASTER = 1, FOR_EMBEDDING = 2, FOR_SAMPLING = 3, FOR_DROPOUT = 4 };

struct Key {
    u32 step, low, high;
};

// the 4 words of block `block`
__device__ __forceinline__ void philox(u64 block, u32 purpose, Key key, u32 (&word)[4]) {
    u32 c0 = static_cast<u32>(block), c1 = static_cast<u32>(block >> 32), c2 = key.step, c3 = purpose;
    u32 k0 = key.low, k1 = key.high;
#pragma unroll
    for (int i = 0; i < 7; i++) {
        u64 left = static_cast<u64>(0xD2511F53u) * c0, right = static_cast<u64>(0xCD9E8D57u) * c2;
        c0 = static_cast<u32>(right >> 32) ^ c1 ^ k0, c1 = static_cast<u32>(right);
        c2 = static_cast<u32>(left >> 32) ^ c3 ^ k1, c3 = static_cast<u32>(left);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}
