//! The terminal: its alternate screen in raw mode, its size and its keys.

use std::io::{self, Stdout, Write as _, stdin, stdout};
use std::time::Duration;

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::layout::Rect;
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{isatty, tcgetwinsize};

use super::keys::{Key, keys};

/// A terminal that names no size.
const DEFAULT: [u16; 2] = [80, 24];
/// The largest part that is drawn.
const MAX: [u16; 2] = [500, 300];

/// Whether there is a terminal.
pub(super) fn is_there() -> bool {
    isatty(stdin()) && isatty(stdout())
}

/// The screen. It is as before when this is dropped.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    _restored: Restored,
}

struct Restored;

impl Screen {
    /// Error: the terminal's.
    pub(super) fn enter() -> io::Result<Self> {
        enable_raw_mode()?;
        let restored = Restored;
        execute!(stdout(), EnterAlternateScreen)?;
        let viewport = Viewport::Fixed(size()?);
        let backend = CrosstermBackend::new(stdout());
        let terminal = Terminal::with_options(backend, TerminalOptions { viewport })?;
        Ok(Self { terminal, _restored: restored })
    }

    /// Draws, if there is something new or the size is another. Error: the terminal's.
    pub(super) fn draw(
        &mut self,
        is_new: bool,
        draw: impl FnOnce(&mut Frame<'_>),
    ) -> io::Result<()> {
        let size = size()?;
        let is_other = size != self.terminal.get_frame().area();
        if is_other {
            self.terminal.resize(size)?;
        }
        if is_new || is_other {
            self.terminal.draw(draw)?;
        }
        Ok(())
    }

    /// The keys that come in this time, once one has come. Error: the terminal's.
    pub(super) fn keys(&mut self, limit: Duration) -> io::Result<Vec<Key>> {
        let stdin = stdin();
        let limit = Timespec::try_from(limit).unwrap_or_default();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut fds, Some(&limit)) {
            Ok(0) | Err(Errno::INTR) => return Ok(Vec::new()),
            ready => ready?,
        };
        let mut bytes = [0; 256];
        match rustix::io::read(&stdin, &mut bytes) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(Errno::INTR | Errno::AGAIN) => Ok(Vec::new()),
            count => Ok(keys(&bytes[..count?])),
        }
    }
}

fn size() -> io::Result<Rect> {
    let size = tcgetwinsize(stdout())?;
    let sides = [size.ws_col, size.ws_row];
    let side = |at: usize| match sides[at] {
        0 => DEFAULT[at],
        side => side.min(MAX[at]),
    };
    Ok(Rect::new(0, 0, side(0), side(1)))
}

impl Drop for Restored {
    fn drop(&mut self) {
        // It may have gone.
        let _ = execute!(stdout(), Show, LeaveAlternateScreen);
        let _ = stdout().flush();
        let _ = disable_raw_mode();
    }
}
