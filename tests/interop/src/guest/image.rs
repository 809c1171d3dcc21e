//! The guest's kernel and file system, made of Debian packages once and cached.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufWriter, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::apt::Apt;
use super::tool::Tool;
use super::{cpio, kernel};
use crate::error::{Error, Result};

/// Kernels that have `rdma_rxe`, the newest first. (Cloud kernels lack it.)
const KERNELS: [&str; 2] = ["linux-image-6.12-amd64", "linux-image-amd64"];

/// The packages of the guest's programs; their dependencies come with them.
#[rustfmt::skip]
const PACKAGES: [&str; 16] = [
    "busybox-static", "dash", "libc6", "libc-bin", "libgcc-s1", "iproute2", "ethtool", "nftables", "rdma-core", "ibverbs-providers",
    "ibverbs-utils", "rdmacm-utils", "perftest", "iperf3", "util-linux", "wireguard-tools",
];

/// The programs that the guest has besides busybox's, with the libraries that they need.
#[rustfmt::skip]
const PROGRAMS: [&str; 36] = [
    "dash",
    "ip", "tc", "ss", "bridge", "rdma", "ethtool", "nft",
    "ibv_devices", "ibv_devinfo", "ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong", "ibv_asyncwatch",
    "rping", "ucmatose", "udaddy", "mckey", "rdma_server", "rdma_client", "rstream", "cmtime",
    "ib_send_bw", "ib_send_lat", "ib_write_bw", "ib_write_lat", "ib_read_bw", "ib_read_lat", "ib_atomic_bw", "ib_atomic_lat",
    "iperf3", "taskset", "prlimit", "chrt", "wg",
];

/// Libraries that programs open at run time, or that the host's programs need.
#[rustfmt::skip]
const LIBRARIES: [&str; 8] = [
    "libc.so.6", "libm.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libibverbs.so.1", "librdmacm.so.1",
];

/// Modules that each guest needs.
const NEEDED: [&str; 7] =
    ["virtio_mmio", "virtio_net", "virtio_console", "9p", "9pnet_virtio", "ib_uverbs", "rdma_rxe"];

/// Modules that a test may ask for.
#[rustfmt::skip]
const WANTED: [&str; 61] = [
    "virtio_mmio", "virtio_net", "virtio_console", "virtio_rng", "9p", "9pnet_virtio", "veth", "tun", "dummy", "bridge",
    "ib_core", "ib_uverbs", "ib_umad", "rdma_cm", "rdma_ucm", "rdma_rxe",
    "crc32_generic", "crc32_pclmul", "crc32c_generic", "crc32", "crc32_cryptoapi",
    "sch_netem", "sch_tbf", "sch_ingress", "sch_fq", "cls_bpf", "act_bpf", "cls_u32", "cls_flower", "act_mirred", "act_gact",
    "xsk_diag", "af_packet", "ipv6", "nf_tables", "nft_compat", "nft_counter", "nft_numgen", "nft_meta_bridge", "nf_conntrack",
    "nfnetlink", "nft_ct", "nft_limit", "br_netfilter", "sch_htb", "ifb", "cls_matchall", "act_police",
    "ipvlan", "macvlan", "vrf", "vxlan", "wireguard", "esp4", "esp6", "xfrm_user", "xfrm_algo", "gcm", "ctr", "seqiv", "ghash_generic",
];

/// Where dynamic loaders look.
const LIBRARY_DIRS: [&str; 4] =
    ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib", "usr/lib"];

const INIT: &str = include_str!("init.sh");

/// Raise this when the image changes though the lists above do not.
const VERSION: u32 = 1;

/// A kernel and a file system to boot.
#[derive(Debug, Clone)]
pub struct Image {
    dir: PathBuf,
}

impl Image {
    /// The image in the cache, made now if there is none: that takes about half a minute and the
    /// network. Several processes may call this at once. Error: another architecture, no Debian, no
    /// network, a missing program: the error says what to do.
    pub fn prepare() -> Result<Self> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(Error::new("the guest is an x86-64 machine: this is another"));
        }
        let cache = cache_directory()?;
        fs::create_dir_all(&cache).map_err(|e| Error::because(cache.display(), e))?;
        let lock = File::create(cache.join("lock"))?;
        lock.lock()?;
        let dir = cache.join(format!("guest-{:016x}", fingerprint()));
        if !dir.join("packages.txt").exists() {
            eprintln!("interop: making the guest's image in {}", dir.display());
            let made = cache.join(format!("making-{}", std::process::id()));
            let result = make(&made).and_then(|()| Ok(fs::rename(made.join("image"), &dir)?));
            let cleared = fs::remove_dir_all(&made);
            result?;
            cleared?;
        }
        Ok(Self { dir })
    }

    /// The kernel, an ELF file.
    #[must_use]
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// The initial root file system.
    #[must_use]
    pub fn initrd(&self) -> PathBuf {
        self.dir.join("initrd.cpio")
    }

    /// The Debian packages of the image, one file name per line, the kernel's first. Error: the
    /// cache was tampered with.
    pub fn packages(&self) -> Result<String> {
        Ok(fs::read_to_string(self.dir.join("packages.txt"))?)
    }

    /// The path of a note about this machine.
    pub(crate) fn note(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// `$XDG_CACHE_HOME/rocinante`, else `interop` in cargo's target directory.
fn cache_directory() -> Result<PathBuf> {
    if let Some(cache) = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()) {
        return Ok(PathBuf::from(cache).join("rocinante"));
    }
    let program = std::env::current_exe()?;
    // For …/target/debug/deps/matrix-0123, the directory with cargo's own files.
    let is_cargos = |dir: &&Path| {
        [".rustc_info.json", "CACHEDIR.TAG"].iter().any(|file| dir.join(file).exists())
    };
    let target = program.ancestors().find(is_cargos);
    target.map(|dir| dir.join("interop")).ok_or_else(|| {
        Error::new("where to keep the guest's image? Set XDG_CACHE_HOME, or run this by cargo")
    })
}

/// Changes with everything that determines the image, except the packages' versions.
fn fingerprint() -> u64 {
    let mut hasher = DefaultHasher::new();
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    (VERSION, KERNELS, PACKAGES, PROGRAMS, LIBRARIES, WANTED, INIT, release).hash(&mut hasher);
    hasher.finish()
}

/// Makes an image in `dir/image`; all else goes to `dir`.
fn make(dir: &Path) -> Result<()> {
    let (image, tree) = (dir.join("image"), dir.join("tree"));
    fs::create_dir_all(&image)?;
    let apt = Apt::new(&dir.join("apt"))?;
    let kernel = apt.kernel_behind(&apt.first_of(&KERNELS)?)?;
    let unpacked = dir.join("kernel");
    apt.unpack_one(&kernel, &unpacked)?;
    make_directories(&tree)?;
    add_kernel(&unpacked, &image, &tree)?;
    let packages = dir.join("packages");
    let files = apt.unpack_all(&PACKAGES, &packages)?;
    add_programs(&packages, &tree)?;
    write_executable(&tree.join("init"), INIT)?;
    let mut initrd = BufWriter::new(File::create(image.join("initrd.cpio"))?);
    cpio::write_tree(&tree, &mut initrd)?;
    initrd.flush()?;
    // Last: this file says that the image is complete.
    fs::write(image.join("packages.txt"), format!("{kernel}\n{}\n", files.join("\n")))?;
    Ok(())
}

fn make_directories(tree: &Path) -> Result<()> {
    #[rustfmt::skip]
    let all = ["bin", "sbin", "usr/bin", "usr/sbin", "etc", "proc", "sys", "dev", "tmp", "root", "run", "var/run", "lib64", "host",
               "share", "usr/share", "etc/libibverbs.d"];
    all.iter().try_for_each(|dir| Ok(fs::create_dir_all(tree.join(dir))?))
}

fn add_kernel(unpacked: &Path, image: &Path, tree: &Path) -> Result<()> {
    let modules = [unpacked.join("lib/modules"), unpacked.join("usr/lib/modules")];
    let modules = modules.iter().find(|dir| dir.is_dir());
    let version =
        modules.and_then(|dir| fs::read_dir(dir).ok()?.flatten().next()).map(|e| e.path());
    let Some((version, name)) =
        version.as_ref().and_then(|path| Some((path, path.file_name()?.to_str()?)))
    else {
        return Err(Error::new("the kernel's package has no modules"));
    };
    kernel::extract(&unpacked.join(format!("boot/vmlinuz-{name}")), &image.join("vmlinux"))?;
    kernel::modules(version, &tree.join("lib/modules").join(name), &WANTED, &NEEDED)
}

/// Copies the programs and the libraries that they need.
fn add_programs(packages: &Path, tree: &Path) -> Result<()> {
    let mut files = Vec::new();
    for program in PROGRAMS {
        let dirs = ["bin", "sbin", "usr/bin", "usr/sbin"].map(|dir| packages.join(dir));
        let source = dirs.iter().map(|dir| dir.join(program)).find(|path| path.exists());
        let source = source.ok_or_else(|| Error::new(format!("no package has {program}")))?;
        fs::copy(&source, tree.join("usr/bin").join(program))?;
        files.push(source);
    }
    let target = tree.join("usr/lib/x86_64-linux-gnu");
    fs::create_dir_all(target.join("libibverbs"))?;
    let provider = find_rxe_provider(packages)
        .ok_or_else(|| Error::new("the package ibverbs-providers has no library for rxe"))?;
    copy_into(&provider, &target.join("libibverbs"))?;
    copy_into(&packages.join("etc/libibverbs.d/rxe.driver"), &tree.join("etc/libibverbs.d"))?;
    files.push(provider);
    let mut libraries: BTreeSet<PathBuf> = LIBRARY_DIRS
        .iter()
        .flat_map(|dir| LIBRARIES.map(|name| packages.join(dir).join(name)))
        .filter(|path| path.exists())
        .collect();
    files.extend(libraries.iter().cloned());
    let loader = ["lib64", "usr/lib64"].map(|dir| packages.join(dir).join("ld-linux-x86-64.so.2"));
    let loader = loader.into_iter().find(|path| path.exists());
    let loader = loader.ok_or_else(|| Error::new("the package libc6 has no loader"))?;
    let path = LIBRARY_DIRS.map(|dir| packages.join(dir).display().to_string()).join(":");
    for file in &files {
        let list = Tool::new(&loader.display().to_string())
            .args(&["--inhibit-cache", "--library-path", &path, "--list"])
            .arg(file)
            .read()?;
        libraries.extend(list.lines().filter_map(library_in).map(PathBuf::from));
    }
    libraries.iter().try_for_each(|library| copy_into(library, &target))?;
    // Where all loaders look, however the release treats /usr.
    symlink("../usr/lib/x86_64-linux-gnu", tree.join("lib/x86_64-linux-gnu"))?;
    copy_into(&loader, &tree.join("lib64"))?;
    add_busybox(packages, tree)
}

/// The provider of libibverbs for rxe; its name has the version of their private interface.
fn find_rxe_provider(packages: &Path) -> Option<PathBuf> {
    LIBRARY_DIRS.iter().find_map(|dir| {
        let mut providers = fs::read_dir(packages.join(dir).join("libibverbs")).ok()?.flatten();
        let rxe =
            providers.find(|entry| entry.file_name().to_string_lossy().starts_with("librxe-"));
        rxe.map(|entry| entry.path())
    })
}

fn copy_into(file: &Path, dir: &Path) -> Result<()> {
    let target = dir.join(file.file_name().unwrap_or_default());
    fs::copy(file, target).map_err(|error| Error::because(file.display(), error))?;
    Ok(())
}

/// `libc.so.6 => /…/libc.so.6 (0x…)`: the path.
fn library_in(line: &str) -> Option<&str> {
    line.split_once("=> ")?.1.split(" (").next().filter(|path| path.starts_with('/'))
}

fn add_busybox(packages: &Path, tree: &Path) -> Result<()> {
    let source = ["bin/busybox", "usr/bin/busybox"].map(|path| packages.join(path));
    let source = source.iter().find(|path| path.exists());
    let source = source.ok_or_else(|| Error::new("the package busybox-static has no busybox"))?;
    fs::copy(source, tree.join("bin/busybox"))?;
    let list = Tool::new(&source.display().to_string()).arg("--list").read()?;
    for applet in list.lines().filter(|name| *name != "busybox" && !PROGRAMS.contains(name)) {
        // The kernel calls /sbin/modprobe.
        let dir = if applet == "modprobe" { "sbin" } else { "bin" };
        symlink("/bin/busybox", tree.join(dir).join(applet))?;
    }
    // busybox's own shell would prefer its own `ip` and other applets to programs on the search
    // path.
    fs::remove_file(tree.join("bin/sh"))?;
    symlink("/usr/bin/dash", tree.join("bin/sh"))?;
    fs::write(tree.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
    fs::write(tree.join("etc/group"), "root:x:0:\n")?;
    fs::write(tree.join("etc/hosts"), "127.0.0.1 localhost\n::1 localhost\n")?;
    Ok(())
}

fn write_executable(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_the_loader() {
        let line = "\tlibc.so.6 => /x/lib/libc.so.6 (0x00007f)";
        assert_eq!(library_in(line), Some("/x/lib/libc.so.6"));
        assert_eq!(library_in("\tlinux-vdso.so.1 (0x00007ffd)"), None);
        assert_eq!(library_in("\tlibx.so => not found"), None);
    }

    #[test]
    fn needed_modules_are_wanted() {
        assert!(NEEDED.iter().all(|name| WANTED.contains(name)));
    }
}
