//! The result of a cell.

use super::node::Step;

/// The result of a cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All was as expected.
    Passed,
    /// The deviation.
    Failed(String),
    /// The reason why it was not run, or cannot be run.
    NotRun(String),
}

/// The start of an error's text if a side cannot do the step.
const MARK: &str = "cannot be run: ";

/// The error of a step that a side cannot do, without being at fault.
#[must_use]
pub fn cannot(why: impl std::fmt::Display) -> String {
    format!("{MARK}{why}")
}

impl From<Step> for Verdict {
    fn from(step: Step) -> Self {
        match step {
            Ok(()) => Self::Passed,
            // A node may have put its name in front.
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
