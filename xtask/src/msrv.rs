//! The lowest version of Rust that builds the command and all crates below it.

use crate::toolchain::Toolchain;
use crate::{command, demo};

/// `rust-version` of the workspace, with its patch level. The AVX-512 intrinsics of
/// `verbs-api/src/provider/memory/summed.rs` need 1.89; of the dependencies, `libloading` 0.9 and
/// `hdrhistogram` 7.6 need 1.88.
const VERSION: &str = "1.89.0";

/// Compiles the command with that version; without the toolchain, returns `name: reason`.
///
/// # Errors
/// It does not compile, the manifest names another version, or CI has no such toolchain.
pub(crate) fn check() -> Result<Vec<String>, String> {
    let manifest = std::fs::read_to_string("Cargo.toml").map_err(|error| error.to_string())?;
    let minor = VERSION.strip_suffix(".0").unwrap_or(VERSION);
    if !manifest.contains(&format!("rust-version = \"{minor}\"\n")) {
        return Err(format!("rust-version in Cargo.toml is not {minor}, which xtask tests"));
    }
    let toolchain = match Toolchain::of(VERSION) {
        Ok(toolchain) => toolchain,
        Err(why) if std::env::var_os("CI").is_some() => return Err(why),
        Err(why) => return Ok(vec![format!("msrv: no Rust {VERSION}: {why}")]),
    };
    let mut check = toolchain.cargo(&["check", "--quiet", "--locked", "-p", "rocinante-cli"]);
    // Its own: the running toolchain would compile all of it again.
    check.env("CARGO_TARGET_DIR", demo::target()?.join("msrv"));
    command::run(&mut check)?;
    Ok(vec![])
}
