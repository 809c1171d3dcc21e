//! Prepares a Debian kernel for a quick start: extracts the ELF file from the compressed image, and
//! copies the wanted modules with their dependencies.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::tool::Tool;
use crate::error::{Error, Result};

/// Extracts the kernel proper from a bzImage. Booted directly (PVH), it need not unpack itself,
/// which takes seconds on an emulated processor. The offsets are those of
/// `Documentation/arch/x86/boot.rst`. Error: the image has another format, or the program that
/// unpacks it is missing.
pub(crate) fn extract(image: &Path, elf: &Path) -> Result<()> {
    let mut file = File::open(image).map_err(|e| Error::because(image.display(), e))?;
    let mut header = [0; 0x250];
    file.read_exact(&mut header)?;
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| header[at + i]));
    let setup_sectors = u64::from(header[0x1f1]);
    let (payload_offset, payload_length) = (u64::from(word(0x248)), u64::from(word(0x24c)));
    file.seek(SeekFrom::Start((setup_sectors + 1) * 512 + payload_offset))?;
    let mut payload = Vec::new();
    // The last four bytes are the unpacked size.
    file.take(payload_length.saturating_sub(4)).read_to_end(&mut payload)?;
    let packed = elf.with_extension("packed");
    fs::write(&packed, &payload)?;
    let unpacked = decompress(&packed, &payload)?;
    fs::remove_file(&packed)?;
    if !unpacked.starts_with(b"\x7fELF") {
        return Err(Error::new(format!("{} has no ELF kernel in it", image.display())));
    }
    Ok(File::create(elf)?.write_all(&unpacked)?)
}

/// Unpacks a file. `start` is its first bytes, which give the format.
fn decompress(file: &Path, start: &[u8]) -> Result<Vec<u8>> {
    let (program, args): (&str, &[&str]) = match start {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("zstd", &["-qdc"]),
        [0xfd, b'7', b'z', b'X', ..] => ("xz", &["-dc", "--single-stream"]),
        [0x1f, 0x8b, ..] => ("gzip", &["-dc"]),
        [0x02, 0x21, 0x4c, 0x18, ..] => ("lz4", &["-dc"]),
        [0x7f, b'E', b'L', b'F', ..] => return Ok(fs::read(file)?),
        _ => return Err(Error::new(format!("unknown compression of {}", file.display()))),
    };
    Tool::new(program).args(args).input(File::open(file)?).bytes()
}

/// Unpacks the modules `wanted`, and their dependencies, into `target` (`lib/modules/VERSION` of
/// the guest), with the indices by which `modprobe` finds them by name and by alias. A wanted
/// module that this kernel lacks is left out, unless it is one of `needed` and not built in. Error:
/// one of `needed` is missing, or a file cannot be read or written.
pub(crate) fn modules(
    source: &Path,
    target: &Path,
    wanted: &[&str],
    needed: &[&str],
) -> Result<()> {
    let mut files = BTreeMap::new();
    find_modules(&source.join("kernel"), &mut files)?;
    let builtin = fs::read_to_string(source.join("modules.builtin")).unwrap_or_default();
    let builtin: BTreeSet<String> = builtin.lines().filter_map(|l| name_of(l.as_ref())).collect();
    fs::create_dir_all(target)?;
    let mut set = ModuleSet { files: &files, target, infos: BTreeMap::new() };
    for name in wanted {
        set.add(name)?;
    }
    for name in needed {
        if !set.infos.contains_key(*name) && !builtin.contains(*name) {
            return Err(Error::new(format!("the kernel has no module {name}")));
        }
    }
    fs::write(target.join("modules.dep"), set.dependencies())?;
    fs::write(target.join("modules.alias"), set.aliases())?;
    for index in ["modules.builtin", "modules.order", "modules.builtin.modinfo"] {
        if source.join(index).exists() {
            fs::copy(source.join(index), target.join(index))?;
        }
    }
    Ok(())
}

/// The contents of a module's section `.modinfo`.
#[derive(Debug, Default, PartialEq, Eq)]
struct Info {
    depends: Vec<String>,
    aliases: Vec<String>,
}

struct ModuleSet<'a> {
    files: &'a BTreeMap<String, PathBuf>,
    target: &'a Path,
    infos: BTreeMap<String, Info>,
}

impl ModuleSet<'_> {
    fn add(&mut self, name: &str) -> Result<()> {
        let name = name.replace('-', "_");
        let Some(path) = self.files.get(&name).filter(|_| !self.infos.contains_key(&name)) else {
            return Ok(());
        };
        let bytes = decompress(path, &fs::read(path)?)?;
        fs::write(self.target.join(format!("{name}.ko")), &bytes)?;
        let info = read_info(&bytes);
        let depends = info.depends.clone();
        self.infos.insert(name, info);
        depends.iter().try_for_each(|name| self.add(name))
    }

    /// `modules.dep`: each module with the modules to be loaded before it, the last one first.
    fn dependencies(&self) -> String {
        let mut text = String::new();
        for name in self.infos.keys() {
            let mut order = Vec::new();
            self.before(name, &mut order);
            let before: String =
                order.iter().rev().skip(1).map(|name| format!(" {name}.ko")).collect();
            text += &format!("{name}.ko:{before}\n");
        }
        text
    }

    /// Appends `name` after its dependencies.
    fn before(&self, name: &str, order: &mut Vec<String>) {
        if order.iter().any(|known| known == name) {
            return;
        }
        if let Some(info) = self.infos.get(name) {
            for dependency in &info.depends {
                self.before(dependency, order);
            }
            order.push(name.to_owned());
        }
    }

    fn aliases(&self) -> String {
        let of = |(name, info): (&String, &Info)| {
            info.aliases.iter().map(|alias| format!("alias {alias} {name}\n")).collect::<String>()
        };
        self.infos.iter().map(of).collect()
    }
}

fn find_modules(dir: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(|e| Error::because(dir.display(), e))?.flatten() {
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            find_modules(&path, found)?;
        } else if let Some(name) = name_of(&path) {
            found.insert(name, path);
        }
    }
    Ok(())
}

/// `rdma_rxe` of `…/rdma_rxe.ko.xz`.
fn name_of(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (name, rest) = file.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst" | ".gz").then(|| name.replace('-', "_"))
}

/// The entries of `.modinfo` are `key=value`, each with a zero before and behind.
fn read_info(module: &[u8]) -> Info {
    let mut info = Info::default();
    for entry in module.split(|byte| *byte == 0) {
        if let Some(list) = entry.strip_prefix(b"depends=") {
            let list = String::from_utf8_lossy(list).replace('-', "_");
            info.depends = list.split(',').filter(|n| !n.is_empty()).map(str::to_owned).collect();
        } else if let Some(alias) = entry.strip_prefix(b"alias=") {
            info.aliases.push(String::from_utf8_lossy(alias).into_owned());
        }
    }
    info
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_say_what_they_need() {
        let module =
            b"\x7fELF..\0license=GPL\0alias=rdma-link-rxe\0depends=ib_core,udp-tunnel\0name=x\0";
        let info = read_info(module);
        assert_eq!(info.depends, ["ib_core", "udp_tunnel"]);
        assert_eq!(info.aliases, ["rdma-link-rxe"]);
    }

    #[test]
    fn modules_are_named_by_their_files() {
        assert_eq!(name_of("a/b/sch-fq.ko.xz".as_ref()).as_deref(), Some("sch_fq"));
        assert_eq!(name_of("a/b/veth.ko".as_ref()).as_deref(), Some("veth"));
        assert_eq!(name_of("a/b/modules.dep".as_ref()), None);
    }

    #[test]
    fn what_is_needed_is_loaded_before() {
        let info = |depends: &[&str]| Info {
            depends: depends.iter().map(|&name| name.to_owned()).collect(),
            aliases: vec![],
        };
        let files = BTreeMap::new();
        let infos = [("a", info(&["b", "c"])), ("b", info(&["c"])), ("c", info(&["builtin"]))];
        let infos = infos.map(|(name, info)| (name.to_owned(), info)).into();
        let set = ModuleSet { files: &files, target: Path::new(""), infos };
        assert_eq!(set.dependencies(), "a.ko: b.ko c.ko\nb.ko: c.ko\nc.ko:\n");
    }
}
