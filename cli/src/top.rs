//! `rocinante top`: the figures of `rocinante stat` as a view in a terminal.

mod gather;
mod held;
mod keys;
mod screen;
mod view;

use std::process::ExitCode;
use std::time::Duration;

use signal_hook::consts::SIGINT;

use self::gather::Gatherer;
use self::keys::Key;
use self::screen::Screen;
use self::view::{Sort, View};
use crate::ending;
use crate::output::{Failure, Output, Result};
use crate::perf::interval;
use crate::stat::Source;

const PROGRAM: &str = "rocinante top";

/// Watch what containers, and their queue pairs, send and receive, and what holds them back
///
/// The figures are those of `rocinante stat`, each of its interval alone. Enter opens a container,
/// which shows its queue pairs; Esc closes it; `<` and `>` choose the column to sort by; `r` turns
/// the order around; q ends it.
///
/// Exit status: 0 after q, 1 if the terminal vanishes, 2 if the command line makes no sense or
/// there is no terminal, 128 plus its number for a signal.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Open this one, named as for `rocinante stat`
    container: Option<String>,
    /// Sort by this column
    #[arg(short, long, value_enum, default_value_t = Sort::Tx)]
    sort: Sort,
    /// Seconds of an interval
    #[arg(short, long, default_value = "1", value_parser = interval::seconds)]
    interval: Duration,
    /// Where the agent serves metrics, as of `rocinante stat`
    #[arg(long, value_name = "PLACE")]
    agent: Option<String>,
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: false };
    ending::attended(PROGRAM, out, || watch(args))
}

fn watch(args: &Args) -> Result {
    if !screen::is_there() {
        let text = "standard input and output are no terminal: use `rocinante stat`, or with \
                    --json for programs";
        return Err(Failure::Usage(text.into()));
    }
    let source = Source::of(args.agent.as_deref())?;
    let mut view = View::new(source.to_string(), args.sort, args.container.clone());
    let gatherer = Gatherer::start(source, args.interval, args.container.clone());
    let gone = |error: std::io::Error| Failure::Failed(format!("the terminal has gone: {error}"));
    let mut screen = Screen::enter().map_err(gone)?;
    loop {
        ending::check_signal()?;
        let news = gatherer.news();
        let has_news = !news.is_empty();
        news.into_iter().for_each(|it| view.hear(it));
        screen.draw(has_news, |frame| view.draw(frame)).map_err(gone)?;
        let opened = view.opened().map(str::to_owned);
        for key in screen.keys(ending::LOOK).map_err(gone)? {
            match key {
                Key::Quit => return Ok(()),
                Key::Interrupt => return Err(ending::stopped_by(SIGINT)),
                key => view.press(key),
            }
        }
        if view.opened() != opened.as_deref() {
            gatherer.open(view.opened());
        }
    }
}
