//! Options of other programs that this command does not take. It knows their names, so that the
//! error can give a reason.

use std::marker::PhantomData;

use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::output::Failure;

/// An option that is not taken.
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
            matches.value_source(option.long) == Some(clap::parser::ValueSource::CommandLine)
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
