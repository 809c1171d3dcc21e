//! What becomes of a cell.

use super::node::Step;

/// What became of a cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All was as it should be.
    Passed,
    /// What was otherwise.
    Failed(String),
    /// Why it was not run, or cannot be.
    NotRun(String),
}

/// What the error of a step begins with that a side cannot do.
const MARK: &str = "cannot be run: ";

/// The error of a step which a side cannot do, though that is no fault of it.
#[must_use]
pub fn cannot(why: impl std::fmt::Display) -> String {
    format!("{MARK}{why}")
}

impl From<Step> for Verdict {
    fn from(step: Step) -> Self {
        match step {
            Ok(()) => Self::Passed,
            // A node may have put its name before it.
            Err(why) => match why.split_once(MARK) {
                Some((_, why)) => Self::NotRun(why.to_owned()),
                None => Self::Failed(why),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_run_has_not_failed() {
        assert_eq!(Verdict::from(Ok(())), Verdict::Passed);
        assert_eq!(Verdict::from(Err("late".to_owned())), Verdict::Failed("late".into()));
        let why = format!("mlx5_0: {}", cannot("no atomics"));
        assert_eq!(Verdict::from(Err(why)), Verdict::NotRun("no atomics".into()));
    }
}
