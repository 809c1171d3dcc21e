//! Where a path leads if the tree of files lies over the machine's own. Links and `..` are followed
//! as path_resolution(7) has it.

/// Length of the longest path (`PATH_MAX`), with its zero.
const PATH_MAX: usize = libc::PATH_MAX as usize;
/// Links in a path: `MAXSYMLINKS` of Linux.
const LINKS_MAX: usize = 40;

/// A path with room of its own, and a zero behind it.
pub(crate) struct Buffer {
    bytes: [u8; PATH_MAX],
    len: usize,
}

/// The kind of file at a path.
pub(crate) enum Named {
    /// A link; the buffer has its target from now on.
    Link,
    /// Something else.
    Plain,
    /// Nothing.
    Missing,
}

impl Buffer {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; PATH_MAX], len: 0 }
    }

    /// The path without its zero.
    pub(crate) fn path(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// The path with its zero.
    pub(crate) fn with_zero(&self) -> &[u8] {
        &self.bytes[..=self.len]
    }

    /// Room for another path, of which `filled` then says the length.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[..PATH_MAX - 1]
    }

    pub(crate) fn filled(&mut self, len: usize) {
        self.len = len.min(PATH_MAX - 1);
        self.bytes[self.len] = 0;
    }

    /// # Errors
    /// `None`: it is too long.
    pub(crate) fn push(&mut self, more: &[u8]) -> Option<()> {
        let end = self.len + more.len();
        if end >= PATH_MAX {
            return None;
        }
        self.bytes[self.len..end].copy_from_slice(more);
        self.filled(end);
        Some(())
    }

    pub(crate) fn set(&mut self, path: &[u8]) -> Option<()> {
        self.len = 0;
        self.push(path)
    }

    /// Leaves the last component; of `/` nothing is left.
    fn leave(&mut self) {
        let slash = self.path().iter().rposition(|byte| *byte == b'/');
        self.filled(slash.unwrap_or(0));
    }
}

/// Follows `path` from the directory `out`, an absolute path without links, to the file that it
/// names. `out` is `/` without a byte if it is the root. `read` reads a link. `None` if a path is
/// too long or the links do not end.
pub(crate) fn follow(
    out: &mut Buffer,
    path: &[u8],
    last: bool,
    mut read: impl FnMut(&Buffer, &mut Buffer) -> Named,
) -> Option<()> {
    let (mut rest, mut target) = (Buffer::new(), Buffer::new());
    rest.set(path)?;
    if path.starts_with(b"/") {
        out.filled(0);
    }
    let (mut at, mut links) = (0, 0);
    loop {
        let left = &rest.path()[at..];
        let Some(begin) = left.iter().position(|byte| *byte != b'/') else { return Some(()) };
        let word = &left[begin..];
        let end = word.iter().position(|byte| *byte == b'/').unwrap_or(word.len());
        let (word, behind) = word.split_at(end);
        at += begin + end;
        match word {
            b"." => continue,
            b".." => out.leave(),
            word => {
                let before = out.len;
                out.push(b"/")?;
                out.push(word)?;
                if behind.is_empty() && !last {
                    return Some(());
                }
                match read(out, &mut target) {
                    Named::Plain => {}
                    Named::Missing => return out.push(behind),
                    Named::Link => {
                        links += 1;
                        if links > LINKS_MAX {
                            return None;
                        }
                        target.push(behind)?;
                        let is_absolute = target.path().starts_with(b"/");
                        out.filled(if is_absolute { 0 } else { before });
                        std::mem::swap(&mut rest, &mut target);
                        at = 0;
                    }
                }
            }
        }
    }
}
