//! Options of other programs that this command does not take, or that change nothing here. It knows
//! their names, so that the error can give a reason.

use std::marker::PhantomData;

use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::output::Failure;

/// An option that is not taken, or changes nothing.
#[derive(Debug)]
pub struct Option_ {
    /// `-x`, if it has a short name.
    pub short: Option<char>,
    /// `--name`.
    pub long: &'static str,
    /// Whether a value follows.
    pub value: bool,
    /// Why it is not taken, and what to do instead.
    pub why: &'static str,
    /// Whether it changes nothing here, given with this value. Then it is taken without a word.
    pub harmless: fn(&str) -> bool,
}

/// An option that is not taken.
#[must_use]
pub const fn refused(
    short: Option<char>,
    long: &'static str,
    value: bool,
    why: &'static str,
) -> Option_ {
    Option_ { short, long, value, why, harmless: |_| false }
}

/// An option that changes nothing here.
#[must_use]
pub const fn harmless(long: &'static str, value: bool) -> Option_ {
    refused(None, long, value, "").unless(|_| true)
}

impl Option_ {
    /// The same, but values with which it is `harmless` are taken.
    #[must_use]
    pub const fn unless(mut self, harmless: fn(&str) -> bool) -> Self {
        self.harmless = harmless;
        self
    }
}

/// The refused options of one program.
pub trait Table {
    /// The options.
    const OPTIONS: &'static [Option_];
}

/// The refused options on a command line.
#[derive(Debug)]
pub struct Refused<T> {
    given: Vec<&'static Option_>,
    of: PhantomData<T>,
}

impl<T: Table> Refused<T> {
    /// Checks that no refused option was given.
    ///
    /// # Errors
    /// A refused option was given. The text gives the reason.
    pub fn check(&self) -> Result<(), Failure> {
        let Some(option) = self.given.first() else { return Ok(()) };
        let name = match option.short {
            Some(short) => format!("-{short} (--{})", option.long),
            None => format!("--{}", option.long),
        };
        Err(Failure::Usage(format!("{name} is not taken: {}", option.why)))
    }
}

impl<T: Table> clap::FromArgMatches for Refused<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = T::OPTIONS.iter().filter(|option| {
            let mut values = matches.get_raw(option.long).into_iter().flatten();
            matches.value_source(option.long) == Some(clap::parser::ValueSource::CommandLine)
                && values.any(|value| !value.to_str().is_some_and(option.harmless))
        });
        Ok(Self { given: given.collect(), of: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<T: Table> clap::Args for Refused<T> {
    fn augment_args(command: Command) -> Command {
        T::OPTIONS.iter().fold(command, |command, option| {
            let action = if option.value { ArgAction::Append } else { ArgAction::SetTrue };
            let arg = Arg::new(option.long).long(option.long).action(action).hide(true);
            command.arg(match option.short {
                Some(short) => arg.short(short),
                None => arg,
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}
