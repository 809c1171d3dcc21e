//! Changes of a namespace that end with the value that has them.

use crate::error::Result;
use crate::netns::Netns;

/// Changes of namespaces, each with the command that undoes it. Dropping this value undoes them,
/// the last one first.
#[derive(Debug, Default)]
pub struct Changes(Vec<(Netns, String)>);

impl Changes {
    /// Runs the command line `forth` in a namespace. `back` undoes it.
    pub fn make(&mut self, netns: &Netns, forth: &str, back: &str) -> Result {
        netns.command(forth)?;
        self.made(netns, back);
        Ok(())
    }

    /// Undoes by `back` a change that was made already.
    pub(super) fn made(&mut self, netns: &Netns, back: &str) {
        self.0.push((netns.clone(), back.to_owned()));
    }

    /// Undoes all changes. Error: the first that cannot be undone; the others are.
    pub fn undo(mut self) -> Result {
        self.undo_all()
    }

    fn undo_all(&mut self) -> Result {
        let undone = self.0.drain(..).rev().map(|(netns, back)| netns.command(&back).map(drop));
        undone.fold(Ok(()), Result::and)
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        // The lab's namespaces vanish later with everything in them, so an error does not matter.
        let _ = self.undo_all();
    }
}
