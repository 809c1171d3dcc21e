//! The search: depth first, the largest interface first, into the uplink that it fills best.
//!
//! Packing is NP-hard, so some inputs need more steps than a machine makes in a millisecond. Three
//! things keep those rare: bounds that refuse at once, no second try of uplinks that are equally
//! free, and a memory of what was left when nothing fitted.

use std::collections::HashSet;
use std::fmt;

use crate::{INTERFACES_MAX, Interface, Rates, UPLINKS_MAX, Uplink};

/// Steps of a search that takes less than a millisecond: each step is an interface that tries all
/// uplinks.
pub const STEPS: u32 = 4096;

/// Why interfaces have no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// They do not fit: every arrangement was tried, or a sum excludes all.
    Full,
    /// The search ended after its steps. They may fit or not.
    Undecided,
    /// More interfaces than [`INTERFACES_MAX`].
    TooManyInterfaces,
    /// More uplinks than [`UPLINKS_MAX`].
    TooManyUplinks,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("not enough free RDMA bandwidth"),
            Self::Undecided => f.write_str(
                "the search for a place was given up; ask for fewer interfaces, or for equal ones",
            ),
            Self::TooManyInterfaces => {
                write!(f, "a pod may ask for {INTERFACES_MAX} RDMA interfaces at most")
            }
            Self::TooManyUplinks => write!(f, "a node may have {UPLINKS_MAX} uplinks at most"),
        }
    }
}

impl std::error::Error for Refused {}

/// The index of an uplink for each interface, in the order of `wanted`. The sum of all `min` of an
/// uplink is no more than its free rates. The search makes no more than `steps` steps: [`STEPS`]
/// for one node, fewer for each of many.
///
/// # Errors
/// There is no such arrangement, or none was found within `steps`; too many of either.
pub fn place(uplinks: &[Uplink], wanted: &[Interface], steps: u32) -> Result<Vec<usize>, Refused> {
    if wanted.len() > INTERFACES_MAX {
        return Err(Refused::TooManyInterfaces);
    }
    if uplinks.len() > UPLINKS_MAX {
        return Err(Refused::TooManyUplinks);
    }
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    // The sort is stable: equal interfaces stay in the order of their pod.
    order.sort_by_key(|at| std::cmp::Reverse(size(wanted[*at].min)));
    let sorted: Vec<Rates> = order.iter().map(|at| wanted[*at].min).collect();
    let free: Vec<Rates> = uplinks.iter().map(Uplink::free).collect();
    if !may_fit(&free, &sorted) {
        return Err(Refused::Full);
    }
    let mut search = Search {
        left: free.iter().copied().fold(0, |sum, free| mixed(free).wrapping_add(sum)),
        needs: Needs::of(&sorted),
        wanted: sorted,
        free,
        places: Vec::with_capacity(wanted.len()),
        failed: HashSet::new(),
        steps,
    };
    if !search.rest()? {
        return Err(Refused::Full);
    }
    let mut places = vec![0; wanted.len()];
    for (at, uplink) in order.into_iter().zip(search.places) {
        places[at] = uplink;
    }
    Ok(places)
}

/// The order of interfaces.
fn size(rates: Rates) -> (u64, u64) {
    let (more, less) = (rates.egress.max(rates.ingress), rates.egress.min(rates.ingress));
    (more, less)
}

/// Whether no count excludes all arrangements: of the `n` largest rates of a direction each is at
/// least the `n`th, so uplinks have room for `n` of that.
fn may_fit(free: &[Rates], wanted: &[Rates]) -> bool {
    [|it: &Rates| it.egress, |it: &Rates| it.ingress].into_iter().all(|way| {
        let mut rates: Vec<u64> = wanted.iter().map(way).collect();
        rates.sort_unstable_by(|a, b| b.cmp(a));
        rates.iter().enumerate().all(|(at, rate)| {
            let room = |free: &Rates| way(free).checked_div(*rate).unwrap_or(u64::MAX);
            free.iter().map(room).fold(0, u64::saturating_add) > at as u64
        })
    })
}

/// Of the interfaces from each one on, in each direction.
struct Needs {
    sums: Vec<(u128, u128)>,
    least: Vec<Rates>,
}

impl Needs {
    fn of(wanted: &[Rates]) -> Self {
        let (mut sum, mut least) = ((0, 0), Rates { egress: u64::MAX, ingress: u64::MAX });
        let from_behind = wanted.iter().rev().map(|it| {
            sum = (sum.0 + u128::from(it.egress), sum.1 + u128::from(it.ingress));
            least.egress = least.egress.min(it.egress);
            least.ingress = least.ingress.min(it.ingress);
            (sum, least)
        });
        let mut both: Vec<_> = from_behind.collect();
        both.reverse();
        let (sums, least) = both.into_iter().unzip();
        Self { sums, least }
    }
}

struct Search {
    /// The largest first.
    wanted: Vec<Rates>,
    needs: Needs,
    /// Of each uplink.
    free: Vec<Rates>,
    /// The sum of `mixed` of `free`: equal for uplinks that swapped what they have left.
    left: u128,
    /// Of the interfaces that have a place.
    places: Vec<usize>,
    /// The free rates, and the number of interfaces that had no place then.
    failed: HashSet<(usize, u128)>,
    steps: u32,
}

impl Search {
    /// Whether all that have no place get one.
    fn rest(&mut self) -> Result<bool, Refused> {
        let at = self.places.len();
        let Some(&need) = self.wanted.get(at) else { return Ok(true) };
        self.steps = self.steps.checked_sub(1).ok_or(Refused::Undecided)?;
        if !self.sums_fit(at) || self.failed.contains(&(at, self.left)) {
            return Ok(false);
        }
        let mut tried = [false; UPLINKS_MAX];
        while let Some(best) = self.best(need, &tried) {
            let before = (self.free[best], self.left);
            for (other, tried) in self.free.iter().zip(&mut tried) {
                *tried |= *other == before.0;
            }
            let after = before.0.without(need);
            self.free[best] = after;
            self.left = self.left.wrapping_sub(mixed(before.0)).wrapping_add(mixed(after));
            self.places.push(best);
            if self.rest()? {
                return Ok(true);
            }
            self.places.pop();
            (self.free[best], self.left) = before;
        }
        self.failed.insert((at, self.left));
        Ok(false)
    }

    /// The uplink that has least left with `need`, of those that were not tried.
    fn best(&self, need: Rates, tried: &[bool; UPLINKS_MAX]) -> Option<usize> {
        let fitting = self.free.iter().zip(tried).enumerate();
        let fitting = fitting.filter(|(_, (free, tried))| !**tried && free.hold(need));
        // In the directions that it asks for.
        let left = |free: &Rates| {
            let egress = if need.egress > 0 { free.egress } else { 0 };
            let ingress = if need.ingress > 0 { free.ingress } else { 0 };
            u128::from(egress) + u128::from(ingress)
        };
        fitting.min_by_key(|(_, (free, _))| left(free)).map(|(at, _)| at)
    }

    /// Whether the sums of both directions fit into uplinks that hold the least interface at all.
    fn sums_fit(&self, at: usize) -> bool {
        let least = self.needs.least[at];
        let useful = self.free.iter().filter(|free| free.hold(least));
        let (out, into) = useful.fold((0_u128, 0_u128), |(out, into), free| {
            (out + u128::from(free.egress), into + u128::from(free.ingress))
        });
        let (egress, ingress) = self.needs.sums[at];
        out >= egress && into >= ingress
    }
}

/// A number for what an uplink has left. Sums of them stand for sets: two different sets have the
/// same sum once in 2^128, and then a search may end too early, as [`Refused::Full`].
fn mixed(rates: Rates) -> u128 {
    let mix = |seed: u64| {
        // The finalizer of SplitMix64, twice.
        let step = |value: u64| {
            let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            value ^ (value >> 31)
        };
        step(step(rates.egress ^ seed).wrapping_add(rates.ingress))
    };
    u128::from(mix(0x9e37_79b9_7f4a_7c15)) << 64 | u128::from(mix(0xd1b5_4a32_d192_ed03))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uplinks(speeds: &[u64]) -> Vec<Uplink> {
        let named = speeds.iter().enumerate();
        named.map(|(at, speed)| Uplink::new(&format!("u{at}"), *speed)).collect()
    }

    fn out(rates: &[u64]) -> Vec<Interface> {
        let of = |rate: &u64| Rates { egress: *rate, ingress: 0 };
        rates.iter().map(|rate| Interface { min: of(rate), max: None }).collect()
    }

    #[test]
    fn an_interface_goes_where_least_is_left() {
        assert_eq!(place(&uplinks(&[9, 4, 6]), &out(&[4]), STEPS), Ok(vec![1]));
        assert_eq!(place(&uplinks(&[9, 4, 6]), &out(&[5, 1]), STEPS), Ok(vec![2, 2]));
    }

    #[test]
    fn an_earlier_choice_is_taken_back() {
        assert_eq!(place(&uplinks(&[9, 6]), &out(&[3, 3, 8]), STEPS), Ok(vec![1, 1, 0]));
        // The largest first into the fullest leaves the last 2 without a place.
        let wanted = out(&[5, 4, 4, 3, 2, 2]);
        let places = place(&uplinks(&[10, 10]), &wanted, STEPS).unwrap();
        let sum = |uplink| {
            let there = places.iter().zip(&wanted).filter(|(at, _)| **at == uplink);
            there.map(|(_, it)| it.min.egress).sum::<u64>()
        };
        assert_eq!((sum(0), sum(1)), (10, 10));
    }

    #[test]
    fn each_direction_has_to_fit() {
        let both = |egress, ingress| Interface { min: Rates { egress, ingress }, max: None };
        let two = uplinks(&[10, 10]);
        assert_eq!(place(&two, &[both(6, 1), both(1, 6), both(6, 1)], STEPS), Ok(vec![0, 0, 1]));
        // Each direction alone would fit.
        assert_eq!(place(&two, &[both(9, 2), both(2, 9), both(2, 2)], STEPS), Err(Refused::Full));
    }

    #[test]
    fn what_is_taken_is_not_free() {
        let mut two = uplinks(&[10, 10]);
        two[0].taken = Rates { egress: 7, ingress: 0 };
        two[1].taken = Rates { egress: 11, ingress: 0 };
        assert_eq!(place(&two, &out(&[3]), STEPS), Ok(vec![0]));
        assert_eq!(place(&two, &out(&[4]), STEPS), Err(Refused::Full));
        assert_eq!(place(&two, &out(&[0, 0]), STEPS).map(|it| it.len()), Ok(2));
    }

    #[test]
    fn nothing_wanted_fits_everywhere_and_nothing_fits_nowhere() {
        assert_eq!(place(&[], &[], STEPS), Ok(vec![]));
        assert_eq!(place(&[], &out(&[0]), STEPS), Err(Refused::Full));
    }

    #[test]
    fn numbers_and_rates_have_their_bounds() {
        assert_eq!(place(&uplinks(&[1; 17]), &[], STEPS), Err(Refused::TooManyUplinks));
        assert_eq!(place(&uplinks(&[1]), &out(&[0; 65]), STEPS), Err(Refused::TooManyInterfaces));
        let most = u64::MAX;
        let two = uplinks(&[most; 2]);
        assert_eq!(place(&two, &out(&[most, most]), STEPS).map(|it| it.len()), Ok(2));
        assert_eq!(place(&two, &out(&[most, most, 1]), STEPS), Err(Refused::Full));
    }

    #[test]
    fn counts_and_sums_refuse_without_a_search() {
        // 17 of more than half an uplink on 16, of which each direction is asked.
        assert_eq!(place(&uplinks(&[10; 16]), &out(&[6; 17]), 0), Err(Refused::Full));
        assert_eq!(place(&uplinks(&[10; 16]), &out(&[6; 16]), 0), Err(Refused::Undecided));
        assert_eq!(place(&uplinks(&[10, 10]), &out(&[11]), 0), Err(Refused::Full));
    }

    #[test]
    fn a_search_ends_after_its_steps() {
        // Odd sums that no even uplink can be filled with: the sums fit exactly, the parts do not.
        let wanted: Vec<u64> = (0..64).map(|at| 2_000_003 + 2 * (at * 7919 % 5003)).collect();
        let each = wanted.iter().sum::<u64>().div_ceil(16);
        let answer = place(&uplinks(&[each; 16]), &out(&wanted), STEPS);
        assert_eq!(answer, Err(Refused::Undecided));
    }
}
