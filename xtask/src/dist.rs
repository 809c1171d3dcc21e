//! `cargo xtask dist`: the release's files, below `cli/dist/out`. The command `rocinante` and the
//! daemon `rocinante-agent` are static programs for each of [`TARGETS`], with the libraries of
//! `rocinante run` where they can be built, and the files that start the agent; an archive of all
//! of it, Debian packages, OCI images, completions, man pages, checksums and bills of materials.

use crate::command::{self, cargo, is_installed, words};
use crate::foreign::Root;
use crate::{debs, demo, files, images, machine, sbom, setup};
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The targets that programs are built for, linked by rustc's own linker (`.cargo/config.toml`),
/// and the processors' names.
pub(crate) const TARGETS: [(&str, &str); 2] =
    [("x86_64-unknown-linux-musl", "x86_64"), ("aarch64-unknown-linux-musl", "aarch64")];
const OUT: &str = "cli/dist/out";
/// The packages of the programs, which are called so.
const PROGRAMS: [(&str, &str); 4] = [
    ("rocinante-cli", "rocinante"),
    ("rocinante-agent", "rocinante-agent"),
    ("rocinante-cni", "rocinante-cni"),
    ("rocinante-kube", "rocinante-kube"),
];
/// The directory of the files that start the agent.
const AGENT: &str = "host/agent/dist";
const AGENT_FILES: &str = "Containerfile agent.toml alerts.yml cdi.json grafana.json \
                           rocinante-agent.service rocinante.cil";
/// The libraries that `rocinante run` preloads: as cargo builds them, and as they are called beside
/// the command.
const LIBRARIES: [(&str, &str); 2] = [
    ("librocinante_ibverbs.so", "libibverbs.so.1"),
    ("librocinante_paths.so", "librocinante_paths.so"),
];
/// A link beside them, and where it leads.
const LINK: (&str, &str) = ("libibverbs.so", "libibverbs.so.1");
/// The newest glibc that they may need: that of RHEL 9 and Ubuntu 22.04.
const GLIBC_MAX: (u32, u32) = (2, 34);
const SHELLS: [(&str, &str); 5] = [
    ("bash", "rocinante.bash"),
    ("elvish", "rocinante.elv"),
    ("fish", "rocinante.fish"),
    ("powershell", "_rocinante.ps1"),
    ("zsh", "_rocinante"),
];

/// `cargo xtask dist [PROCESSOR...]`.
pub(crate) fn run(processors: &[&str]) -> Result<(), String> {
    let targets = choose(processors)?;
    if !targets.iter().all(|(_, processor)| machine::is_of(processor)) {
        setup::packages(setup::DIST);
    }
    let packages = shipped()?;
    let names: Vec<&str> = targets.iter().map(|(target, _)| *target).collect();
    names.iter().try_for_each(|name| setup::target(name))?;
    for (package, name) in PROGRAMS {
        println!("dist: building {name} for {}", names.join(" and "));
        // Each by itself, with the features that it asks for.
        let mut build = for_targets("build --locked --profile dist", package, &names);
        command::run(build.args(names.iter().flat_map(|name| same_paths(name))))?;
    }
    let out = Path::new(OUT);
    // An artefact of another version would be misleading.
    let _ = fs::remove_dir_all(out);
    let built = demo::target()?;
    let mut works = None;
    for (target, processor) in &targets {
        let folder = out.join(processor);
        for (_, name) in PROGRAMS {
            let program = folder.join(name);
            files::copy(built.join(target).join("dist").join(name), &program)?;
            let bytes = fs::metadata(&program).map_or(0, |file| file.len());
            println!("{}: {bytes} bytes", program.display());
        }
        for file in AGENT_FILES.split(' ') {
            files::copy(Path::new(AGENT).join(file), folder.join("agent").join(file))?;
        }
        let program = folder.join("rocinante");
        println!("dist: trying the programs for {processor}");
        let Some(mut words) = emulator(processor) else {
            println!("SKIPPED dist: no qemu-{processor}: {} never ran", program.display());
            continue;
        };
        let agent = [&words[..], &[folder.join("rocinante-agent").display().to_string()]].concat();
        words.push(program.display().to_string());
        try_out(&words)?;
        let version = command::read(start(&agent).arg("--version"))?;
        println!("{}: {} ran", agent.join(" "), version.trim());
        works.get_or_insert(words);
    }
    libraries(&targets, &built, out)?;
    let works = works.ok_or("no program runs here, to make completions and man pages")?;
    println!("dist: making completions, man pages, bills of materials, archives and checksums");
    for (shell, file) in SHELLS {
        let script = command::read(start(&works).args(["completions", shell]))?;
        files::write(out.join("completions").join(file), script)?;
    }
    command::run(start(&works).arg("man").arg(out.join("man")))?;
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        files::copy(licence, out.join(licence))?;
    }
    for ((_, name), packages) in PROGRAMS.iter().zip(&packages) {
        files::write(out.join(format!("{name}.cdx.json")), sbom::cyclone_dx(packages)?)?;
    }
    for (_, processor) in &targets {
        let archive = archive(out, processor)?;
        if machine::is_of(processor) {
            unpack_and_run(&archive)?;
        }
    }
    targets.iter().try_for_each(|(_, processor)| images::make(out, processor))?;
    debs::pack(&targets, out)?;
    sums(out)?;
    println!("{OUT}/SHA256SUMS names everything");
    Ok(())
}

/// Builds the libraries of `rocinante run`, beside the command. Prints those that it skips.
fn libraries(targets: &[(&str, &str)], built: &Path, out: &Path) -> Result<(), String> {
    for (_, processor) in targets {
        let target = format!("{processor}-unknown-linux-gnu");
        println!("dist: building the libraries of `rocinante run` for {target}");
        let mut build = cargo("build --locked --profile dist -p rocinante-capi -p rocinante-paths");
        build.args(["--target", &target]);
        let mut foreign = None;
        if machine::triple()? != target {
            let root = setup::target(&target).and_then(|()| Root::of(processor, built));
            match root {
                Ok(root) => foreign = Some(root),
                Err(why) => {
                    println!("SKIPPED dist: no libraries for {processor}: {why}");
                    continue;
                }
            }
        }
        build.args(foreign.iter().flat_map(|root| root.linking(&target)));
        command::run(build.args(same_paths(&target)))?;
        let mut made = Vec::new();
        for (from, to) in LIBRARIES {
            let library = out.join(processor).join(to);
            files::copy(built.join(&target).join("dist").join(from), &library)?;
            let bytes = fs::read(&library).map_err(files::said(&library))?;
            let (len, glibc) = (bytes.len(), glibc(&bytes));
            println!("{}: {len} bytes, needs glibc {}.{}", library.display(), glibc.0, glibc.1);
            if glibc > GLIBC_MAX {
                return Err(format!("{to} needs a newer glibc than {GLIBC_MAX:?}"));
            }
            made.push(fs::canonicalize(&library).map_err(files::said(&library))?);
        }
        // Programs that load it themselves ask for either name.
        let link = out.join(processor).join(LINK.0);
        let _ = fs::remove_file(&link);
        symlink(LINK.1, &link).map_err(files::said(&link))?;
        if let Some(root) = foreign {
            try_foreign(&root, processor, &made)?;
        }
    }
    println!("SKIPPED dist: no libraries for musl: programs for it have another loader");
    Ok(())
}

/// Runs an unmodified program for another processor on the libraries.
fn try_foreign(root: &Root, processor: &str, libraries: &[PathBuf]) -> Result<(), String> {
    let Some(emulator) = emulator(processor).and_then(|mut words| words.pop()) else {
        println!("SKIPPED dist: no qemu-{processor}: its libraries were never loaded");
        return Ok(());
    };
    match root.list_devices(&emulator, libraries)? {
        list if list.contains("roce0") => {
            println!("{emulator}: Debian's ibv_devices for {processor} runs on the libraries");
            Ok(())
        }
        list => Err(format!("ibv_devices for {processor} found no device: {list}")),
    }
}

/// The newest version of glibc that is named in a library.
fn glibc(library: &[u8]) -> (u32, u32) {
    const NODE: &[u8] = b"GLIBC_";
    let at = (0..library.len()).filter(|at| library[*at..].starts_with(NODE));
    let versions = at.filter_map(|at| {
        let rest = &library[at + NODE.len()..];
        let len = rest.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.')?;
        let (major, minor) = std::str::from_utf8(&rest[..len]).ok()?.split_once('.')?;
        let minor = minor.split('.').next()?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    versions.max().unwrap_or_default()
}

/// The targets for these processors; all if none is named.
fn choose(processors: &[&str]) -> Result<Vec<(&'static str, &'static str)>, String> {
    let known = TARGETS.map(|(_, name)| name);
    if let Some(unknown) = processors.iter().find(|name| !known.contains(name)) {
        return Err(format!("no program for {unknown}: {}", known.join(", ")));
    }
    let wanted = |name: &&str| processors.is_empty() || processors.contains(name);
    Ok(TARGETS.into_iter().filter(|(_, name)| wanted(name)).collect())
}

/// `cargo xtask man DIR`.
pub(crate) fn man(directory: &Path) -> Result<(), String> {
    command::run(cargo("run --quiet -p rocinante-cli --bin rocinante -- man").arg(directory))
}

/// Options of cargo that name the sources of crates alike on every machine: they are in a program's
/// panics, and the same sources shall make the same program.
fn same_paths(target: &str) -> [String; 2] {
    let home = std::env::var("HOME").unwrap_or_default();
    let cargo_home = std::env::var("CARGO_HOME").unwrap_or_else(|_| format!("{home}/.cargo"));
    let flag = format!("--remap-path-prefix={cargo_home}/registry/src=crates");
    ["--config".into(), format!("target.{target}.rustflags=[{flag:?}]")]
}

fn for_targets(args: &str, package: &str, targets: &[&str]) -> Command {
    let mut command = cargo(args);
    command.args(["-p", package]);
    command.args(targets.iter().flat_map(|target| ["--target", *target]));
    command
}

/// The packages that each of [`PROGRAMS`] is made of, from `cargo tree`.
pub(crate) fn shipped() -> Result<Vec<Vec<sbom::Line>>, String> {
    PROGRAMS.iter().map(|(package, name)| made_of(package, name)).collect()
}

fn made_of(package: &str, name: &str) -> Result<Vec<sbom::Line>, String> {
    let targets = TARGETS.map(|(target, _)| target);
    let mut tree = for_targets("tree --locked --edges=normal --no-dedupe", package, &targets);
    tree.args(["--prefix=depth", "--format= {p}|{l}|{f}"]);
    let lines = sbom::lines(&command::read(&mut tree)?);
    match for_tests(&lines) {
        wrong if wrong.is_empty() => Ok(lines),
        wrong => Err(format!("{name} has features for tests: {}", wrong.join(", "))),
    }
}

/// The packages with a feature that is for tests alone. Cargo publishes no package that depends on
/// one that is not published.
fn for_tests(lines: &[sbom::Line]) -> Vec<String> {
    let ours = lines.iter().filter(|line| line.name.starts_with("rocinante"));
    let wrong = ours.filter(|line| line.features.iter().any(|name| name == "fuzzing"));
    wrong.map(|line| line.purl()).collect()
}

/// The command prefix that runs programs for `processor`: empty on such a machine, QEMU on others;
/// `None` without QEMU.
pub(crate) fn emulator(processor: &str) -> Option<Vec<String>> {
    if machine::is_of(processor) {
        return Some(vec![]);
    }
    let names = [format!("qemu-{processor}-static"), format!("qemu-{processor}")];
    names.into_iter().find(|name| command::is_installed(name)).map(|name| vec![name])
}

fn start(program: &[String]) -> Command {
    let mut command = Command::new(&program[0]);
    command.args(&program[1..]).env_remove("ROCINANTE_NETDEV");
    command
}

/// Runs the program: two processes, a hundred messages, every byte compared.
fn try_out(program: &[String]) -> Result<(), String> {
    let words = program.join(" ");
    let version = command::read(start(program).arg("--version"))?;
    // Loopback addresses that nothing else is likely to use.
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let [here, there] = [1, 2].map(|net| Ipv4Addr::new(127, 240 + net, high, low).to_string());
    let pingpong = ["pingpong", "--netdev", "udp", "-n", "100", "-c", "--bind"];
    let mut server = start(program);
    server.args(pingpong).arg(&here).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = server.spawn().map_err(|error| format!("{words}: {error}"))?;
    // The client waits for its server.
    let client = command::read(start(program).args(pingpong).args([&there, &here]));
    if client.is_err() {
        let _ = server.kill();
    }
    let ended = server.wait().map_err(|error| error.to_string())?;
    client?;
    if !ended.success() {
        return Err(format!("{words}: the server of pingpong failed: {ended}"));
    }
    println!("{words}: {} ran, and 100 messages went there and back", version.trim());
    Ok(())
}

/// Packs a processor's folder and the licences: one file to download, which unpacks to a folder
/// that can lie anywhere. The same files make the same archive, at any time and for any user.
fn archive(out: &Path, processor: &str) -> Result<PathBuf, String> {
    let name = format!("rocinante-{}-{processor}", env!("CARGO_PKG_VERSION"));
    let file = format!("{name}.tar.gz");
    let mut tar = words(images::SAME);
    tar.current_dir(out).args([&file, "--use-compress-program=gzip -n9"]);
    tar.arg(format!("--transform=s,^{processor},{name},;s,^LICENSE,{name}/LICENSE,"));
    command::run(tar.args([processor, "LICENSE-APACHE", "LICENSE-MIT"]))?;
    Ok(out.join(file))
}

/// Unpacks an archive somewhere else, and runs an unmodified program on its contents.
fn unpack_and_run(archive: &Path) -> Result<(), String> {
    const PROGRAM: &str = "ibv_devices";
    if !is_installed(PROGRAM) {
        println!(
            "SKIPPED dist: {PROGRAM} is not installed: nothing ran from {}",
            archive.display()
        );
        return Ok(());
    }
    let folder = files::scratch("dist")?;
    let mut unpack = words("tar --strip-components=1 -xzf");
    let unpacked = command::run(unpack.arg(archive).arg("-C").arg(&folder));
    let program = folder.join("rocinante").display().to_string();
    let ran = unpacked.and_then(|()| command::read(start(&[program]).args(["run", "--", PROGRAM])));
    let _ = fs::remove_dir_all(&folder);
    match ran? {
        list if list.contains("roce0") => {
            println!("{}: unpacked, it runs {PROGRAM}", archive.display());
            Ok(())
        }
        list => Err(format!("{PROGRAM} of {} found no device: {list}", archive.display())),
    }
}

/// Writes `SHA256SUMS` of everything in `out`, as `sha256sum --check` reads it.
fn sums(out: &Path) -> Result<(), String> {
    let files = "find . ! -type d -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum";
    let text = command::read(Command::new("sh").args(["-ec", files]).current_dir(out))?;
    files::write(out.join("SHA256SUMS"), text)
}

#[cfg(test)]
mod tests {
    use super::{TARGETS, archive, choose, for_tests, glibc, sbom};
    use crate::command::{self, words};
    use crate::files::write;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn the_newest_glibc_counts() {
        let nodes = b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.4\0GLIBCXX_3.4.30\0";
        assert_eq!(glibc(nodes), (2, 34));
        assert_eq!(glibc(b"\x7fELF"), (0, 0));
    }

    #[test]
    fn every_processor_that_is_named_is_known() {
        assert_eq!(choose(&[]).unwrap(), TARGETS);
        assert_eq!(choose(&["aarch64"]).unwrap(), TARGETS[1..]);
        assert!(choose(&["x86_64", "arm64"]).unwrap_err().starts_with("no program for arm64"));
    }

    #[test]
    fn an_archive_has_one_folder_and_says_nothing_of_who_packed_it() {
        let out = crate::files::scratch("archive").unwrap();
        let files = ["rocinante", "libibverbs.so.1", "agent/agent.toml"];
        let files = files.map(|file| format!("x86_64/{file}"));
        for file in files.iter().map(String::as_str).chain(["LICENSE-APACHE", "LICENSE-MIT"]) {
            write(out.join(file), file).unwrap();
        }
        fs::set_permissions(out.join("x86_64/rocinante"), fs::Permissions::from_mode(0o775))
            .unwrap();
        let file = archive(&out, "x86_64").unwrap();
        let first = fs::read(&file).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1100));
        write(out.join("LICENSE-MIT"), "LICENSE-MIT").unwrap();
        assert!(fs::read(archive(&out, "x86_64").unwrap()).unwrap() == first, "another archive");
        let list = command::read(words("tar -tvzf").arg(&file)).unwrap();
        fs::remove_dir_all(&out).unwrap();
        let name = concat!("rocinante-", env!("CARGO_PKG_VERSION"), "-x86_64/");
        let files: Vec<(&str, &str)> = list
            .lines()
            .map(|line| (line.split(' ').next().unwrap(), line.rsplit(' ').next().unwrap()))
            .collect();
        let of = |file: &str| format!("{name}{file}");
        let rest = "LICENSE-APACHE LICENSE-MIT agent/ agent/agent.toml libibverbs.so.1 rocinante";
        let rest: Vec<String> = rest.split(' ').map(of).collect();
        let mut names: Vec<&str> = files.iter().map(|(_, name)| *name).collect();
        names.sort_unstable();
        assert_eq!(names, [&[name.to_owned()], &rest[..]].concat());
        let mode = |wanted: &str| files.iter().find(|(_, file)| *file == of(wanted)).unwrap().0;
        assert_eq!((mode("rocinante"), mode("LICENSE-MIT")), ("-rwxr-xr-x", "-rw-r--r--"));
        assert!(list.lines().all(|line| line.contains(" 0/0 ")), "{list}");
    }

    #[test]
    fn what_tests_need_is_not_shipped() {
        let tree = "0 rocinante-cli v0.1.0 (/r/cli)|MIT|\n1 rocinante v0.1.0 (/r)|MIT|tokio\n\
                    1 clap v4.6.7|MIT|derive,fuzzing";
        assert_eq!(for_tests(&sbom::lines(tree)), [""; 0]);
        let tree =
            "0 rocinante-cli v0.1.0 (/r/cli)|MIT|\n1 rocinante v0.1.0 (/r)|MIT|default,fuzzing";
        assert_eq!(for_tests(&sbom::lines(tree)), ["pkg:cargo/rocinante@0.1.0"]);
    }
}
