//! Programs that no package has: a C program, a script of Python, and examples of crates of others.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::install::Installation;
use crate::table::Row;

/// The runner of Python's own tests.
pub(crate) const VERDICTS: &str = include_str!("../clients/verdicts.py");
const CLIENT: &str = include_str!("../clients/client.c");
const LOADERS: &str = include_str!("../clients/loaders.c");
const MPI: &str = include_str!("../clients/mpi.c");
/// The input of hpcc: a small problem for two ranks.
pub(crate) const HPCC: &str = include_str!("../clients/hpccinf.txt");
const PYVERBS: &str = include_str!("../clients/rc_pyverbs.py");

/// Crates whose examples are rows, at these versions. They find the distribution's libibverbs as
/// their build scripts do.
const CRATES: [(&str, &str); 2] = [("ibverbs", "0.9.2"), ("sideway", "0.4.3")];

/// The words that start the program of a row. Builds it if it is not there yet. Error: it cannot be
/// built, which the last line of the compiler explains.
pub(crate) fn find(row: &Row, installed: &Installation) -> Result<String, String> {
    let Row { program, mode, .. } = row;
    let words = match *program {
        "client.c" => return client(mode, installed).map(shown),
        "loaders.c" => shown(loaders(installed)?),
        "rc_pyverbs.py" => {
            format!("/usr/bin/python3 {}", shown(installed.script("rc_pyverbs.py", PYVERBS)?))
        }
        program => match program.split_once('/') {
            Some((name, example)) => shown(example_of(name, example, installed)?),
            None => program.to_owned(),
        },
    };
    Ok(format!("{words} {mode}"))
}

#[allow(clippy::needless_pass_by_value, reason = "for map")]
fn shown(path: PathBuf) -> String {
    path.display().to_string()
}

/// Compiles the C program with one of its macros, or with a sanitizer, perhaps by another compiler.
fn client(mode: &str, installed: &Installation) -> Result<PathBuf, String> {
    let source = installed.script("client.c", CLIENT)?;
    let (compiler, option) = mode.split_once(' ').unwrap_or(("cc", mode));
    let program = source.with_file_name(format!("client-{compiler}{option}"));
    let mut cc = Command::new(compiler);
    cc.args(["-O1", "-Wall", option]).arg(source).arg("-o").arg(&program);
    // By dlopen(3) it is not linked with the library.
    if option != "-DDLVSYM" {
        cc.arg("-libverbs");
    }
    if option == "-fsanitize=undefined" {
        cc.arg("-fno-sanitize-recover");
    }
    done(&mut cc, "apt install gcc clang libibverbs-dev")?;
    Ok(program)
}

/// Compiles the program that opens the library in several ways.
fn loaders(installed: &Installation) -> Result<PathBuf, String> {
    let source = installed.script("loaders.c", LOADERS)?;
    let program = source.with_file_name("loaders");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wall"]).arg(source).arg("-o").arg(&program).arg("-ldl");
    done(&mut cc, "apt install gcc libibverbs-dev librdmacm1")?;
    Ok(program)
}

/// Compiles the program for MPI.
pub(crate) fn mpi(installed: &Installation) -> Result<PathBuf, String> {
    let source = installed.script("mpi.c", MPI)?;
    let program = source.with_file_name("mpi");
    if !program.exists() {
        let mut cc = Command::new("mpicc");
        cc.args(["-O1", "-Wall"]).arg(source).arg("-o").arg(&program);
        done(&mut cc, "apt install libopenmpi-dev")?;
    }
    Ok(program)
}

/// An example of a crate, where every user can run it.
fn example_of(name: &str, example: &str, installed: &Installation) -> Result<PathBuf, String> {
    let version = CRATES.iter().find(|(known, _)| *known == name);
    let (_, version) =
        version.ok_or_else(|| format!("no version of the crate {name} is chosen"))?;
    let target = target()?.join("dropin");
    let root = target.join(format!("{name}-{version}"));
    let built = root.join("bin").join(example);
    if !built.exists() {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["install", "--quiet", "--locked", name]);
        cargo.args(["--version", &format!("={version}"), "--example", example]);
        cargo.arg("--root").arg(&root).arg("--target-dir").arg(target.join("target"));
        done(&mut cargo, "apt install clang libclang-dev cmake libibverbs-dev")?;
    }
    let copy = installed.runtime().join(format!("{name}-{example}"));
    fs::copy(&built, &copy).map_err(|error| format!("{}: {error}", built.display()))?;
    Ok(copy)
}

/// Cargo's directory, in which this program lies two below.
fn target() -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let target = own.ancestors().find(|place| place.file_name() == Some("target".as_ref()));
    target.map(Path::to_owned).ok_or_else(|| format!("{} is not below target", own.display()))
}

fn done(command: &mut Command, hint: &str) -> Result<(), String> {
    let name = command.get_program().display().to_string();
    let output = command.output().map_err(|error| format!("{name}: {error}: {hint}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let first = said.lines().find(|line| line.contains("error")).unwrap_or("it says nothing");
    Err(format!("{name} fails: {}: perhaps {hint}", first.trim()))
}
