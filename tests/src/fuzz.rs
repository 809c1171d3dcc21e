//! The fuzz targets of `tests/fuzz/`. They are functions of bytes, so an ordinary test
//! (`tests/tests/fuzz.rs`) can run them without cargo-fuzz, over the corpora and over mutated
//! copies of them.
//!
//! A target panics if it finds a fault; it has no other result. It reads its bytes from the front.
//! Missing bytes are zero, so every input has a meaning.

#[path = "../../stack/tests/common/mod.rs"]
#[allow(missing_docs)]
mod common;

mod api;
mod cm;
mod commands;
mod decode;
mod engine;
mod faults;
mod handed;
mod hook;
mod kernel;
mod packet;
mod page;
mod reserved;
mod ucma;
mod words;

use crate::captures;

/// A fuzz target.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name; its file in `tests/fuzz/fuzz_targets` and its corpus have the same name.
    pub name: &'static str,
    /// Runs the target on the bytes of one input.
    pub run: fn(&[u8]),
    /// The seed inputs.
    pub corpus: fn() -> Vec<Vec<u8>>,
    /// Number of mutated inputs that the ordinary test tries.
    pub tries: u32,
}

/// All targets.
pub const TARGETS: [Target; 14] = [
    Target { name: "packet", run: packet::run, corpus: packet::corpus, tries: 200_000 },
    Target { name: "engine", run: engine::run, corpus: engine::corpus, tries: 6_000 },
    Target { name: "api", run: api::run, corpus: api::corpus, tries: 6_000 },
    Target { name: "cm", run: cm::run, corpus: cm::corpus, tries: 20_000 },
    Target { name: "words", run: words::run, corpus: words::corpus, tries: 100_000 },
    Target { name: "kernel", run: kernel::run, corpus: kernel::corpus, tries: 100_000 },
    Target { name: "decode", run: decode::run, corpus: decode::corpus, tries: 6_000 },
    Target { name: "handed", run: handed::run, corpus: handed::corpus, tries: 100_000 },
    Target { name: "commands", run: commands::run, corpus: commands::corpus, tries: 100_000 },
    Target { name: "hook", run: hook::run, corpus: hook::corpus, tries: 100_000 },
    Target { name: "page", run: page::run, corpus: page::corpus, tries: 20_000 },
    Target { name: "ucma", run: ucma::run, corpus: ucma::corpus, tries: 3_000 },
    Target { name: "reserved", run: reserved::run, corpus: reserved::corpus, tries: 100_000 },
    Target { name: "faults", run: faults::run, corpus: faults::corpus, tries: 100_000 },
];

/// The target with this name. Panics if there is none.
#[must_use]
pub fn target(name: &str) -> &'static Target {
    TARGETS.iter().find(|target| target.name == name).expect("a target of this name")
}

/// An input, read from the front.
#[derive(Debug)]
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let len = self.0.len().min(N);
        let (now, later) = self.0.split_at(len);
        bytes[..len].copy_from_slice(now);
        self.0 = later;
        bytes
    }

    fn u8(&mut self) -> u8 {
        self.bytes::<1>()[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::from(self.u8()) % all.len()]
    }

    /// The next bytes, at most `len` of them.
    fn slice(&mut self, len: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }
}

/// Pseudo-random numbers; the same seed gives the same numbers.
#[derive(Debug)]
pub struct Random(fastrand::Rng);

impl Random {
    /// The numbers of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// The next number, less than `below`.
    pub fn below(&mut self, below: usize) -> usize {
        self.0.usize(..below.max(1))
    }

    /// A mutated copy of one of `from`: changed bits and bytes, cuts, repeats, and parts of other
    /// inputs.
    pub fn changed(&mut self, from: &[Vec<u8>]) -> Vec<u8> {
        let mut input = from[self.below(from.len())].clone();
        for _ in 0..=self.below(6) {
            let len = input.len();
            if len == 0 {
                input.push(self.below(256) as u8);
                continue;
            }
            let at = self.below(len);
            match self.below(8) {
                0 | 1 => input[at] ^= 1 << self.below(8),
                2 => input[at] = self.below(256) as u8,
                3 => input[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                4 => input.truncate(at),
                5 => input.insert(at, self.below(256) as u8),
                6 => {
                    let end = at + self.below(len - at + 1);
                    input.extend(input[at..end].to_vec());
                }
                _ => {
                    let other = &from[self.below(from.len())];
                    let cut = self.below(other.len() + 1);
                    input.truncate(at);
                    input.extend_from_slice(&other[cut..]);
                }
            }
        }
        input.truncate(4096);
        input
    }
}

/// The RoCEv2 packets of all captures.
fn captured() -> Vec<Vec<u8>> {
    captures::all().into_iter().map(|captured| captured.bytes).collect()
}
