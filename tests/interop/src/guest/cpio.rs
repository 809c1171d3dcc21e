//! The kernel's archive format for initial root file systems: `newc`, as in
//! `Documentation/driver-api/early-userspace/buffer-format.rst` of Linux.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// File type bits of a mode (inode(7)).
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// Writes the tree below `root` as one archive. Root owns all entries, and entries are sorted by
/// name, so equal trees make equal archives. Error: a file cannot be read or the archive cannot be
/// written.
pub(crate) fn write_tree(root: &Path, out: &mut impl Write) -> io::Result<()> {
    let mut archive = Archive { out, inode: 0 };
    archive.directory(root, "")?;
    archive.entry("TRAILER!!!", 0, &[])
}

struct Archive<'a, W: Write> {
    out: &'a mut W,
    inode: u32,
}

impl<W: Write> Archive<'_, W> {
    fn directory(&mut self, path: &Path, name: &str) -> io::Result<()> {
        let mut entries = fs::read_dir(path)?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let file = entry.file_name().to_string_lossy().into_owned();
            let name = if name.is_empty() { file } else { format!("{name}/{file}") };
            let metadata = entry.metadata()?;
            let permissions = metadata.permissions().mode() & 0o7777;
            if metadata.is_dir() {
                self.entry(&name, DIRECTORY | permissions, &[])?;
                self.directory(&entry.path(), &name)?;
            } else if metadata.is_symlink() {
                let target = fs::read_link(entry.path())?;
                self.entry(&name, SYMLINK | 0o777, target.as_os_str().as_encoded_bytes())?;
            } else if metadata.mode() & REGULAR == REGULAR {
                self.entry(&name, REGULAR | permissions, &fs::read(entry.path())?)?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, name: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let too_large = || io::Error::other(format!("{name} is too large for an archive"));
        let size = u32::try_from(data.len()).map_err(|_| too_large())?;
        let name_size = u32::try_from(name.len() + 1).map_err(|_| too_large())?;
        // Inode, mode, owner, group, links, time, size, device and represented device (two numbers
        // each), name, checksum.
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            header += &format!("{field:08x}");
        }
        let mut bytes = header.into_bytes();
        bytes.extend_from_slice(name.as_bytes());
        bytes.push(0);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        self.out.write_all(&bytes)?;
        self.out.write_all(data)?;
        self.out.write_all(&[0; 3][..data.len().wrapping_neg() % 4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_becomes_an_archive() {
        let root = tempfile::TempDir::new().unwrap();
        let root = root.path();
        fs::create_dir(root.join("bin")).unwrap();
        fs::write(root.join("bin/x"), b"hello").unwrap();
        std::os::unix::fs::symlink("x", root.join("bin/y")).unwrap();
        let mut archive = Vec::new();
        write_tree(root, &mut archive).unwrap();
        assert_eq!(archive.len() % 4, 0);
        let text = String::from_utf8_lossy(&archive);
        assert_eq!(text.matches("070701").count(), 4);
        // The header is 110 bytes; "bin" and its end make 114, padded to 116.
        assert_eq!(&archive[110..114], b"bin\0");
        assert_eq!(&archive[116..122], b"070701");
        assert_eq!(&archive[116 + 54..116 + 62], b"00000005");
        assert!(text.contains("hello") && text.ends_with("TRAILER!!!\0\0\0\0"));
    }
}
