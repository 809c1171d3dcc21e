//! What nobody may guess: numbers of queue pairs, first PSNs and keys, as a device draws them. Each bit is as often set as not, whatever was
//! drawn before, and nothing comes again more often than by chance.
//!
//! Every bound is such that fair draws are outside of it less than once in 10⁹ runs.

use std::collections::HashSet;
use std::fmt::Debug;

use rocinante::{Access, Context};
use rocinante_tests::harness::{Backend, Harness, Setup};
use rocinante_tests::require_backend;

/// Draws of each kind.
const DRAWS: usize = 4096;

/// How far the count of a bit may be from the half. By Hoeffding's inequality fair bits are further away with 2·exp(−2·t²/n) = 2·exp(−50) < 4·10⁻²², and fewer than
/// 10,000 counts are looked at.
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

/// As many as not, in each bit of `words`.
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
    require_backend!(Backend::Udp);
    let all = draws();
    for Draws { name, bits, numbers } in &all {
        assert_fair(&numbers.iter().copied(), *bits, name);
        // A counter, or a step that is always the same, has differences with a bit that is always or never set.
        let pairs = || numbers.iter().zip(&numbers[1..]);
        assert_fair(&pairs().map(|(a, b)| a ^ b), *bits, &(name, "from one to the next"));
        assert_fair(&pairs().map(|(a, b)| b.wrapping_sub(*a)), *bits, &(name, "the steps"));
        for far in [2, 3, 4, 8, 16, 64] {
            let pairs = numbers.iter().zip(&numbers[far..]);
            assert_fair(&pairs.map(|(a, b)| a ^ b), *bits, &(name, "so many later", far));
        }
        // One bit tells nothing of another.
        for apart in 1..*bits {
            let turned = numbers.iter().map(|word| word ^ (word >> apart | word << (bits - apart)));
            assert_fair(&turned, *bits, &(name, "so many bits apart", apart));
        }
    }
    // And nothing of one kind follows from another's.
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

/// The number of draws that are equal to an earlier one is about Poisson's, of a mean of n²/2^(bits+1): 128 of 16 bits, 0.5 of 24, 0.002 of 32. More than the mean, eight of
/// its roots and twelve have a probability below 10⁻¹².
#[test]
fn nothing_comes_again_more_often_than_by_chance() {
    require_backend!(Backend::Udp);
    for Draws { name, bits, numbers } in draws() {
        let mean = (DRAWS as f64).powi(2) / 2f64.powi(bits as i32 + 1);
        let most = mean + 8.0 * mean.sqrt() + 12.0;
        let different: HashSet<_> = numbers.iter().collect();
        let again = numbers.len() - different.len();
        assert!((again as f64) < most, "{name}: {again} come again, {mean} were to be expected");
        // Nor too rarely: drawn without putting back, of 16 bits none would.
        assert!(bits > 16 || again > 30, "{name}: {again} come again, {mean} were to be expected");
    }
}
