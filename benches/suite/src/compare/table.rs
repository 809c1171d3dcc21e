//! The figures of all runs, and the ratios between providers.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::{Serialize, Serializer};
use serde_json::json;

use super::figure::FigureKey;
use crate::workers::Provider;
use rocinante_cli::measure::Spread;
use rocinante_cli::output::{Failure, Result, digits};

/// All figures that were measured.
#[derive(Debug)]
pub(super) struct Comparison {
    providers: Vec<Provider>,
    figures: BTreeMap<FigureKey, HashMap<Provider, Vec<f64>>>,
    skipped: Vec<(Provider, String)>,
}

/// With fewer runs the ranges say too little.
const RUNS_MIN: usize = 3;

/// How a provider compares with the reference, the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Rank {
    /// All runs were better than all of the reference.
    Ahead,
    /// All runs were worse.
    Behind,
    /// The ranges overlap, or there are too few runs.
    Level,
}

impl Comparison {
    pub(super) fn new(providers: Vec<Provider>) -> Self {
        Self { providers, figures: BTreeMap::new(), skipped: Vec::new() }
    }

    pub(super) fn add(&mut self, provider: Provider, figures: Vec<(FigureKey, f64)>) {
        for (key, value) in figures {
            self.figures.entry(key).or_default().entry(provider).or_default().push(value);
        }
    }

    pub(super) fn skip(&mut self, provider: Provider, why: String) {
        self.skipped.push((provider, why));
    }

    pub(super) fn is_skipped(&self, provider: Provider) -> bool {
        self.skipped.iter().any(|(skipped, _)| *skipped == provider)
    }

    /// Fails if there is nothing to compare.
    pub(super) fn check(&self) -> Result {
        let left = self.providers.iter().filter(|provider| !self.is_skipped(**provider)).count();
        if left >= 2 && !self.figures.is_empty() {
            return Ok(());
        }
        let why: Vec<_> = self.skipped.iter().map(|(_, why)| why.as_str()).collect();
        let what = if why.is_empty() { "no figure has that name".into() } else { why.join("; ") };
        Err(Failure::Failed(format!("there are no two providers to compare: {what}")))
    }

    fn present(&self) -> impl Iterator<Item = Provider> {
        self.providers.iter().copied().filter(|provider| !self.is_skipped(*provider))
    }

    fn spread(&self, key: FigureKey, provider: Provider) -> Option<Spread> {
        Spread::of(self.figures.get(&key)?.get(&provider)?.clone())
    }

    fn runs(&self, key: FigureKey, provider: Provider) -> usize {
        self.figures.get(&key).and_then(|of| of.get(&provider)).map_or(0, Vec::len)
    }

    /// The provider's median divided by the reference's (the inverse where less is better), and
    /// whether the difference is certain. One or two runs leave it uncertain.
    fn relation(&self, key: FigureKey, provider: Provider) -> Option<(f64, Rank)> {
        let reference = self.present().next()?;
        let (own, base) = (self.spread(key, provider)?, self.spread(key, reference)?);
        let runs = self.runs(key, provider).min(self.runs(key, reference));
        let (ratio, better, worse) = if key.measure.rises() {
            (own.median / base.median, own.min > base.max, own.max < base.min)
        } else {
            (base.median / own.median, own.max < base.min, own.min > base.max)
        };
        let place = match (better, worse) {
            _ if runs < RUNS_MIN => Rank::Level,
            (true, _) => Rank::Ahead,
            (_, true) => Rank::Behind,
            _ => Rank::Level,
        };
        Some((ratio, place))
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "| figure | unit |")?;
        for (index, provider) in self.present().enumerate() {
            write!(f, " {} |", provider.name())?;
            if index > 0 {
                write!(f, " ratio |")?;
            }
        }
        writeln!(f, "\n|{}", "---|".repeat(1 + 2 * self.present().count()))?;
        for &key in self.figures.keys() {
            write!(f, "| {key} | {} |", key.measure.unit())?;
            for (index, provider) in self.present().enumerate() {
                match self.spread(key, provider) {
                    Some(s) => {
                        let [min, median, max] = [s.min, s.median, s.max].map(digits);
                        write!(f, " {median} ({min}–{max}) |")?;
                    }
                    None => write!(f, " – |")?,
                }
                if index == 0 {
                    continue;
                }
                match self.relation(key, provider) {
                    Some((ratio, Rank::Ahead)) => write!(f, " **{}** ahead |", digits(ratio))?,
                    Some((ratio, Rank::Behind)) => write!(f, " {} behind |", digits(ratio))?,
                    Some((ratio, Rank::Level)) => write!(f, " {} |", digits(ratio))?,
                    None => write!(f, " – |")?,
                }
            }
            writeln!(f)?;
        }
        let reference = self.present().next().map_or("", Provider::name);
        write!(
            f,
            "\nMedian (smallest–largest) of the runs. A ratio says how many times better than {reference}; \"ahead\" and \"behind\" only if \
             the ranges of {RUNS_MIN} runs or more do not overlap."
        )?;
        for (provider, why) in &self.skipped {
            write!(f, "\nSkipped {}: {why}", provider.name())?;
        }
        Ok(())
    }
}

impl Serialize for Comparison {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let row = |key: FigureKey| {
            let mut providers = serde_json::Map::new();
            for provider in self.present() {
                let mut entry = json!(self.spread(key, provider));
                if let Some((ratio, place)) = self.relation(key, provider) {
                    entry["ratio"] = ratio.into();
                    entry["place"] = json!(place);
                }
                providers.insert(provider.name().to_owned(), entry);
            }
            json!({"figure": key.to_string(), "unit": key.measure.unit(), "providers": providers})
        };
        let rows: Vec<_> = self.figures.keys().map(|key| row(*key)).collect();
        let skipped: Vec<_> = self
            .skipped
            .iter()
            .map(|(provider, why)| json!({"provider": provider.name(), "why": why}))
            .collect();
        let reference = self.present().next().map(Provider::name);
        json!({"baseline": reference, "rows": rows, "skipped": skipped}).serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workers::Measure;

    #[test]
    fn ahead_means_that_the_ranges_do_not_overlap() {
        let mut comparison = Comparison::new(vec![Provider::Hw, Provider::Udp]);
        let key = FigureKey { mtu: 1024, measure: Measure::WriteLat, size: 64 };
        let place = |values: [[f64; 3]; 2]| {
            let mut comparison = Comparison::new(vec![Provider::Hw, Provider::Udp]);
            for (provider, values) in [Provider::Hw, Provider::Udp].into_iter().zip(values) {
                values.iter().for_each(|value| comparison.add(provider, vec![(key, *value)]));
            }
            comparison.relation(key, Provider::Udp).unwrap()
        };
        // Less is better.
        assert_eq!(place([[8.0, 9.0, 10.0], [2.0, 3.0, 4.0]]), (3.0, Rank::Ahead));
        assert_eq!(place([[8.0, 9.0, 10.0], [2.0, 3.0, 8.0]]), (3.0, Rank::Level));
        assert_eq!(place([[2.0, 3.0, 4.0], [8.0, 6.0, 10.0]]).1, Rank::Behind);
        comparison.add(Provider::Hw, vec![(key, 8.0), (key, 9.0)]);
        comparison.add(Provider::Udp, vec![(key, 2.0), (key, 3.0)]);
        assert_eq!(comparison.relation(key, Provider::Udp).unwrap().1, Rank::Level);
        let mut comparison = Comparison::new(vec![Provider::Hw, Provider::Udp]);
        assert!(comparison.check().is_err());
        comparison.add(Provider::Hw, vec![(key, 1.0)]);
        comparison.skip(Provider::Udp, "no".into());
        assert!(comparison.check().is_err());
    }
}
