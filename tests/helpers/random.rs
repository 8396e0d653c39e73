//! Random choices that can be repeated.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators").
pub(crate) struct Random(u64);

impl Random {
    /// Begins at the seed that the environment's `SEED` names, or at a fixed one, and prints it.
    pub(crate) fn new() -> Self {
        let seed = std::env::var("SEED").map_or(2041, |seed| seed.parse().unwrap());
        println!("SEED={seed}");
        Self::of(seed)
    }

    /// Begins at this seed.
    pub(crate) fn of(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.bits() % end as u64).unwrap()
    }

    /// One of these.
    pub(crate) fn one_of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.below(index + 1));
        }
    }
}
