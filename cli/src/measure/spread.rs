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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_a_median() {
        assert_eq!(Spread::of(vec![]), None);
        let odd = Spread { min: 1.0, median: 2.0, max: 9.0 };
        assert_eq!(Spread::of(vec![9.0, 1.0, 2.0]), Some(odd));
        let even = Spread { min: 1.0, median: 1.5, max: 2.0 };
        assert_eq!(Spread::of(vec![2.0, 1.0]), Some(even));
    }
}
