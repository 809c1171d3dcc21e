//! Statistics over several runs of one measurement.

use serde::Serialize;

/// Smallest, median and largest of some values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// Median; of an even number of values, the middle between the two.
    pub median: f64,
    /// Largest.
    pub max: f64,
}

impl Spread {
    /// The spread of `values`; `None` without values.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            f64::midpoint(values[middle - 1], values[middle])
        };
        Some(Self { min, median, max })
    }
}

/// Jain's index of fairness: 1 for equal shares, 1/n if one has all, 0 if none has any.
#[must_use]
pub fn jain(shares: impl IntoIterator<Item = f64>) -> f64 {
    let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
    for share in shares {
        (count, sum, squares) = (count + 1.0, sum + share, squares + share * share);
    }
    if squares > 0.0 { sum * sum / (count * squares) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_shares_are_fair() {
        assert!((jain([7.0; 4]) - 1.0).abs() < 1e-12);
        assert!((jain([1.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-12);
        assert!((jain([3.0, 1.0]) - 0.8).abs() < 1e-12);
        assert!(jain([0.4, 0.6]) > 0.95 && jain([0.3, 0.7]) < 0.95);
        assert_eq!(jain([0.0, 0.0]), 0.0);
    }

    #[test]
    fn a_spread_has_a_median() {
        assert_eq!(Spread::of(vec![]), None);
        let odd = Spread { min: 1.0, median: 2.0, max: 9.0 };
        assert_eq!(Spread::of(vec![9.0, 1.0, 2.0]), Some(odd));
        let even = Spread { min: 1.0, median: 1.5, max: 2.0 };
        assert_eq!(Spread::of(vec![2.0, 1.0]), Some(even));
    }
}
