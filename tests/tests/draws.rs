//! Numbers that must be unpredictable: queue pair numbers, first PSNs and keys, as a device draws
//! them. Each bit is set in half of the draws, independently of earlier draws, and no number
//! repeats more often than by chance.
//!
//! Fair draws exceed each bound less than once in 10⁹ runs.

use std::collections::HashSet;
use std::fmt::Debug;

use rocinante::{Access, Context};
use rocinante_tests::harness::{Backend, Harness, Setup};
use rocinante_tests::{need, require};

/// Draws of each kind.
const DRAWS: usize = 4096;

/// How far a bit's count may be from one half of the draws. By Hoeffding's inequality fair bits are
/// further away with probability 2·exp(−2·t²/n) = 2·exp(−50) < 4·10⁻²². Fewer than 10,000 counts
/// are checked.
const AWAY: usize = 320;

/// Numbers of one kind, in the order in which they were drawn.
struct Draws {
    name: &'static str,
    bits: u32,
    numbers: Vec<u32>,
}

fn draws() -> Vec<Draws> {
    let harness = Harness::new(&Setup::new(Backend::Udp));
    let [side, _] = &harness.sides;
    let mut all = [("QPN", 16), ("PSN", 24), ("rkey", 32), ("lkey", 32)]
        .map(|(name, bits)| Draws { name, bits, numbers: Vec::new() });
    for _ in 0..DRAWS {
        // Given back at once, so that each is drawn from all numbers.
        let endpoint = side.qp().build().unwrap().endpoint();
        let [shared, own] =
            [Access::ALL, Access::LOCAL_WRITE].map(|access| side.pd.allocate(64, access).unwrap());
        let numbers = [endpoint.qpn.value(), endpoint.psn.value(), shared.rkey().0, own.lkey().0];
        for (draws, number) in all.iter_mut().zip(numbers) {
            draws.numbers.push(number & u32::MAX >> (32 - draws.bits));
        }
    }
    assert_none_is_held(&side.ctx);
    all.into()
}

fn assert_none_is_held(ctx: &Context) {
    let held = ctx.resources().unwrap();
    assert_eq!((held.qps, held.mrs), (0, 0), "{held:?}");
}

/// Asserts that each bit of `words` is set about as often as not.
fn assert_fair(words: &(impl Iterator<Item = u32> + Clone), bits: u32, what: &dyn Debug) {
    let count = words.clone().count();
    for bit in 0..bits {
        let set = words.clone().filter(|word| word >> bit & 1 == 1).count();
        let away = set.abs_diff(count / 2);
        assert!(away <= AWAY, "{what:?}: bit {bit} is set in {set} of {count}");
    }
}

#[test]
fn draws_are_fair_and_follow_from_nothing() {
    require!(need::backend(Backend::Udp));
    let all = draws();
    for Draws { name, bits, numbers } in &all {
        assert_fair(&numbers.iter().copied(), *bits, name);
        // A counter or a constant step has differences with a bit that is always set or never set.
        let pairs = || numbers.iter().zip(&numbers[1..]);
        assert_fair(&pairs().map(|(a, b)| a ^ b), *bits, &(name, "from one to the next"));
        assert_fair(&pairs().map(|(a, b)| b.wrapping_sub(*a)), *bits, &(name, "the steps"));
        for far in [2, 3, 4, 8, 16, 64] {
            let pairs = numbers.iter().zip(&numbers[far..]);
            assert_fair(&pairs.map(|(a, b)| a ^ b), *bits, &(name, "so many later", far));
        }
        // Bits of one number are independent of each other.
        for apart in 1..*bits {
            let turned = numbers.iter().map(|word| word ^ (word >> apart | word << (bits - apart)));
            assert_fair(&turned, *bits, &(name, "so many bits apart", apart));
        }
    }
    // Numbers of one kind are independent of those of another kind.
    for (at, a) in all.iter().enumerate() {
        for b in &all[..at] {
            let bits = a.bits.min(b.bits);
            let both = a.numbers.iter().zip(&b.numbers);
            for (shift_a, shift_b) in [(0, 0), (a.bits - bits, 0), (0, b.bits - bits)] {
                let both = both.clone().map(|(a, b)| a >> shift_a ^ b >> shift_b);
                assert_fair(&both, bits, &(a.name, b.name, shift_a, shift_b));
            }
        }
    }
}

/// The number of draws that equal an earlier one is about Poisson-distributed, with a mean of
/// n²/2^(bits+1): 128 for 16 bits, 0.5 for 24, 0.002 for 32. A count above the mean plus eight
/// times its root plus twelve has a probability below 10⁻¹².
#[test]
fn nothing_comes_again_more_often_than_by_chance() {
    require!(need::backend(Backend::Udp));
    for Draws { name, bits, numbers } in draws() {
        let mean = (DRAWS as f64).powi(2) / 2f64.powi(bits as i32 + 1);
        let most = mean + 8.0 * mean.sqrt() + 12.0;
        let different: HashSet<_> = numbers.iter().collect();
        let again = numbers.len() - different.len();
        assert!((again as f64) < most, "{name}: {again} come again, {mean} were to be expected");
        // Too few are wrong, too: 16-bit numbers drawn without replacement would never repeat.
        assert!(bits > 16 || again > 30, "{name}: {again} come again, {mean} were to be expected");
    }
}
