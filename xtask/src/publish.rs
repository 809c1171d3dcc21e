//! Whether the crates that are published can be: each is packed as `cargo publish` does, without
//! the upload, and the packages are compiled with the lowest version of Rust, for the targets of
//! `cargo xtask dist`.

use crate::command::{self, cargo, words};
use crate::toolchain::Toolchain;
use crate::{demo, dist, files, test};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// `rust-version` of the workspace, with its patch level. The AVX-512 intrinsics of
/// `verbs-api/soft/src/provider/memory/summed.rs` need 1.89; of the dependencies, `libloading` 0.9
/// and `hdrhistogram` 7.6 need 1.88.
const LOWEST_RUST: &str = "1.89.0";

/// Packs everything that is published, as the sources are now, and compiles the packages with the
/// lowest version of Rust for [`dist::TARGETS`]. Without that toolchain the running one compiles
/// them, and `name: reason` is returned.
///
/// `cargo publish --workspace --dry-run` compiles each package by itself, at twice the cost.
pub(crate) fn check() -> Result<Vec<String>, String> {
    let metadata = test::metadata()?;
    let packages = metadata["packages"].as_array().ok_or("cargo names no packages")?;
    let published: Vec<&Value> = packages.iter().filter(|p| p["publish"].is_null()).collect();
    let wrong: Vec<String> = published.iter().flat_map(|package| lacks(package)).collect();
    if !wrong.is_empty() {
        return Err(wrong.join("\n"));
    }
    dist::shipped()?;
    let dry_run = "publish --workspace --dry-run --no-verify --allow-dirty --locked --quiet";
    command::run(&mut cargo(dry_run))?;
    let names: Vec<&str> = published.iter().filter_map(|p| p["name"].as_str()).collect();
    let folder = unpack(&names, metadata["packages"][0]["version"].as_str().unwrap_or_default())?;
    let manifest = folder.join("Cargo.toml");
    let targets = dist::TARGETS.map(|(target, _)| target);
    let (toolchain, skips) = match Toolchain::of(LOWEST_RUST, &targets) {
        Ok(lowest) => (lowest, vec![]),
        Err(why) if std::env::var_os("CI").is_some() => return Err(why),
        Err(why) => {
            (Toolchain { name: None }, vec![format!("packages: no Rust {LOWEST_RUST}: {why}")])
        }
    };
    let mut check = toolchain.cargo("check --quiet -p rocinante-cli --manifest-path");
    check.arg(&manifest).args(targets.iter().flat_map(|target| ["--target", *target]));
    command::run(check.env("CARGO_TARGET_DIR", folder.join("target")))?;
    Ok(skips)
}

/// Packs these packages and unpacks them as a workspace of their own; its folder.
fn unpack(names: &[&str], version: &str) -> Result<std::path::PathBuf, String> {
    let target = demo::target()?;
    let folder = target.join("packages");
    let mut package = cargo("package --no-verify --allow-dirty --locked --quiet");
    command::run(package.args(names.iter().flat_map(|name| ["-p", *name])))?;
    fs::create_dir_all(&folder).map_err(files::said(&folder))?;
    let (mut members, mut patches) = (String::new(), String::new());
    for name in names {
        let unpacked = format!("{name}-{version}");
        let _ = fs::remove_dir_all(folder.join(&unpacked));
        let archive = target.join("package").join(format!("{unpacked}.crate"));
        // All files in all packages have the same time, and cargo compiles only newer files again.
        let mut unpack = words("tar --extract --gzip --touch --directory");
        command::run(unpack.arg(&folder).arg("--file").arg(archive))?;
        members += &format!("\"{unpacked}\", ");
        patches += &format!("{name} = {{ path = \"{unpacked}\" }}\n");
    }
    let manifest = format!(
        "[workspace]\nresolver = \"3\"\nmembers = [{members}]\n\n[patch.crates-io]\n{patches}"
    );
    files::write(folder.join("Cargo.toml"), manifest)?;
    files::copy("Cargo.lock", folder.join("Cargo.lock"))?;
    Ok(folder)
}

/// The missing fields of a published package that cargo does not ask for.
fn lacks(package: &Value) -> Vec<String> {
    let text = |key: &str| package[key].as_str().unwrap_or_default();
    let (name, description) = (text("name"), text("description"));
    let folder = Path::new(text("manifest_path")).parent().unwrap_or(Path::new("."));
    let readme = fs::read_to_string(folder.join("README.md")).unwrap_or_default();
    let mut wrong = Vec::new();
    if !["LICENSE-MIT", "LICENSE-APACHE"].iter().all(|file| folder.join(file).is_file()) {
        wrong.push(format!("{name}: no licences"));
    }
    if package["metadata"]["docs"]["rs"].is_null() {
        wrong.push(format!("{name}: no [package.metadata.docs.rs]"));
    }
    let lowest = LOWEST_RUST.strip_suffix(".0").unwrap_or(LOWEST_RUST);
    if text("rust_version") != lowest {
        wrong.push(format!("{name}: rust-version is not {lowest}, which is tested"));
    }
    // The crates for users: a library and the command.
    match name {
        "rocinante" => {
            let features = package["features"].as_object().into_iter().flat_map(|f| f.keys());
            let unknown = features.filter(|name| !readme.contains(&format!("`{name}`")));
            wrong.extend(unknown.map(|feature| format!("{name}: README.md lacks `{feature}`")));
        }
        "rocinante-cli" => {}
        _ if description.starts_with("Internal to ") && readme.contains("no semantic") => {}
        _ => wrong.push(format!("{name}: it does not say that it is internal")),
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::lacks;
    use serde_json::json;

    #[test]
    fn what_a_package_lacks_is_named() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let package = |name: &str, folder: &str, feature: &str| {
            lacks(&json!({
                "name": name,
                "description": "Internal to rocinante: a test",
                "manifest_path": format!("{root}/{folder}/Cargo.toml"),
                "rust_version": env!("CARGO_PKG_RUST_VERSION"),
                "metadata": {"docs": {"rs": {}}},
                "features": {feature: []},
            }))
        };
        assert_eq!(package("rocinante-stack", "stack", "x"), [""; 0]);
        assert_eq!(package("rocinante", "verbs-api", "tracing"), [""; 0]);
        assert_eq!(package("rocinante", "verbs-api", "x"), ["rocinante: README.md lacks `x`"]);
        assert_eq!(
            package("rocinante-new", "xtask", "x"),
            ["rocinante-new: no licences", "rocinante-new: it does not say that it is internal"]
        );
    }
}
