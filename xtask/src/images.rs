//! Images of the programs as OCI archives (OCI image specification 1.1): one layer, a
//! configuration, a manifest and an index in a tar file, without an engine or a registry.
//! `podman load` and `ctr images import` read them.

use crate::command::{self, is_installed, words};
use crate::{files, foreign, machine};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// When an image was made: the same files make the same image.
const CREATED: &str = "1970-01-01T00:00:00Z";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Options of tar that leave out the time and the owner of a file.
pub(crate) const SAME: &str = "tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --format=ustar \
                    --mode=u=rwX,go=rX --create --file";
/// Loads the archive `$1` into a folder of its own with podman, and runs the image `$2`. In a mount
/// namespace, because crun refuses both versions of cgroups at once.
const TRY: &str = "set -e
    umount /sys/fs/cgroup/unified 2>/dev/null || :
    folder=$(mktemp -d); trap 'rm -rf \"$folder\"' EXIT
    podman() {
        command podman --storage-driver vfs --root \"$folder/store\" --runroot \"$folder/run\" \
            --tmpdir \"$folder/state\" --cgroup-manager cgroupfs \"$@\"
    }
    podman load --quiet --input \"$1\" >&2
    podman run --rm --network none --read-only --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 \
        \"$2\" --version";

struct Image {
    name: &'static str,
    /// Files of a processor's folder, and where they are in the image.
    files: &'static [(&'static str, &'static str)],
    /// How its program is started.
    config: fn() -> Value,
}

/// As the recipes `cli/dist/Containerfile` and `host/agent/dist/Containerfile` have the first two;
/// `deploy/kubernetes` names the others.
const IMAGES: [Image; 3] = [
    Image {
        name: "rocinante",
        files: &[("rocinante", "rocinante")],
        config: || {
            json!({
                "User": "65534:65534", "Entrypoint": ["/rocinante"], "Cmd": ["devices"],
                "ExposedPorts": { "4791/udp": {}, "18515/tcp": {} },
            })
        },
    },
    Image {
        name: "rocinante-agent",
        files: &[
            ("rocinante-agent", "rocinante-agent"),
            ("rocinante", "rocinante"),
            ("agent/agent.toml", "etc/rocinante/agent.toml"),
        ],
        config: || {
            json!({
                "Entrypoint": ["/rocinante-agent"], "StopSignal": "SIGTERM",
                "Cmd": ["run", "--config", "/etc/rocinante/agent.toml"],
            })
        },
    },
    Image {
        name: "rocinante-kube",
        files: &[("rocinante-kube", "rocinante-kube")],
        config: || json!({ "User": "65534:65534", "Entrypoint": ["/rocinante-kube"] }),
    },
];

/// Makes the archives of a processor's programs in `out`, and runs those of this machine by podman.
pub(crate) fn make(out: &Path, processor: &str) -> Result<(), String> {
    for image in &IMAGES {
        let archive = image.archive(out, processor)?;
        println!("{}", archive.display());
        if !machine::is_of(processor) {
            continue;
        }
        if !machine::is_root() || !is_installed("podman") {
            println!("SKIPPED dist: {} did not run: that takes root and podman", archive.display());
            continue;
        }
        let mut run = words("unshare --mount --propagation private sh -c");
        let version = command::read(run.args([TRY, "sh"]).arg(&archive).arg(image.tag()))?;
        if !version.contains(VERSION) {
            return Err(format!("the image {} says {version}", image.tag()));
        }
        println!("{}: podman ran {}", archive.display(), version.trim());
    }
    Ok(())
}

impl Image {
    fn tag(&self) -> String {
        format!("localhost/{}:{VERSION}", self.name)
    }

    fn archive(&self, out: &Path, processor: &str) -> Result<PathBuf, String> {
        // Images and Debian have the same names.
        let architecture =
            foreign::debian(processor).ok_or(format!("no images for {processor}"))?;
        let file = out.join(format!("{}-{VERSION}-{processor}.oci.tar", self.name));
        let stage = out.join("oci");
        let _ = fs::remove_dir_all(&stage);
        let (root, layout) = (stage.join("root"), stage.join("layout"));
        for (from, to) in self.files {
            files::copy(out.join(processor).join(from), root.join(to))?;
        }
        let tar = stage.join("layer");
        command::run(words(SAME).arg(&tar).arg("-C").arg(&root).args(names(&root)?))?;
        let layer = Blob::of(&layout, &tar, "application/vnd.oci.image.layer.v1.tar")?;
        let config = json!({
            "created": CREATED, "architecture": architecture, "os": "linux",
            "config": (self.config)(),
            "rootfs": { "type": "layers", "diff_ids": [layer.digest()] },
            "history": [{ "created": CREATED, "created_by": "cargo xtask dist" }],
        });
        let config = Blob::of_json(&layout, &config, "application/vnd.oci.image.config.v1+json")?;
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({
            "schemaVersion": 2, "mediaType": kind,
            "config": config.descriptor(), "layers": [layer.descriptor()],
        });
        let mut manifest = Blob::of_json(&layout, &manifest, kind)?.descriptor();
        manifest["platform"] = json!({ "architecture": architecture, "os": "linux" });
        manifest["annotations"] = json!({
            // podman and skopeo take the name from the first, containerd from the second.
            "org.opencontainers.image.ref.name": self.tag(), "io.containerd.image.name": self.tag(),
        });
        let index = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [manifest],
        });
        files::write(layout.join("index.json"), index.to_string())?;
        files::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
        command::run(words(SAME).arg(&file).arg("-C").arg(&layout).args(names(&layout)?))?;
        fs::remove_dir_all(&stage).map_err(files::said(&stage))?;
        Ok(file)
    }
}

/// The entries of a folder.
fn names(folder: &Path) -> Result<Vec<std::ffi::OsString>, String> {
    let entries = fs::read_dir(folder).map_err(files::said(folder))?;
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    names.sort_unstable();
    Ok(names)
}

/// A file that is named by its digest.
struct Blob {
    kind: &'static str,
    sha256: String,
    size: u64,
}

impl Blob {
    fn of(layout: &Path, file: &Path, kind: &'static str) -> Result<Self, String> {
        let sums = command::read(words("sha256sum").arg(file))?;
        let sha256 = sums.split(' ').next().unwrap_or_default().to_owned();
        files::copy(file, layout.join("blobs/sha256").join(&sha256))?;
        let size = fs::metadata(file).map_err(files::said(file))?.len();
        Ok(Self { kind, sha256, size })
    }

    fn of_json(layout: &Path, json: &Value, kind: &'static str) -> Result<Self, String> {
        let file = layout.with_file_name("json");
        files::write(&file, json.to_string())?;
        Self::of(layout, &file, kind)
    }

    fn digest(&self) -> String {
        format!("sha256:{}", self.sha256)
    }

    fn descriptor(&self) -> Value {
        json!({ "mediaType": self.kind, "digest": self.digest(), "size": self.size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a member of an archive.
    fn member(archive: &Path, name: &str) -> Vec<u8> {
        let output = words("tar -xOf").arg(archive).arg(name).output().unwrap();
        assert!(output.status.success(), "{name}: {output:?}");
        output.stdout
    }

    /// Each part is named by the one above, with its size and digest, and the same files make the
    /// same archive.
    #[test]
    fn an_archive_is_an_image_of_its_files() {
        let out = files::scratch("images").unwrap();
        for (processor, architecture) in [("x86_64", "amd64"), ("aarch64", "arm64")] {
            for image in &IMAGES {
                for (file, _) in image.files {
                    files::write(out.join(processor).join(file), format!("the {file}")).unwrap();
                }
                let archive = image.archive(&out, processor).unwrap();
                let json = |name: &str| -> Value {
                    serde_json::from_slice(&member(&archive, name)).unwrap()
                };
                let blob = |of: &Value| {
                    let digest = of["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
                    let name = format!("blobs/sha256/{digest}");
                    let bytes = member(&archive, &name);
                    assert_eq!(of["size"], bytes.len() as u64);
                    files::write(out.join("blob"), &bytes).unwrap();
                    let sum = command::read(words("sha256sum").arg(out.join("blob"))).unwrap();
                    assert!(sum.starts_with(digest), "{sum}");
                    (name, bytes)
                };
                assert_eq!(json("oci-layout")["imageLayoutVersion"], "1.0.0");
                let entry = json("index.json")["manifests"][0].clone();
                assert_eq!(entry["platform"]["architecture"], architecture);
                let manifest: Value = serde_json::from_slice(&blob(&entry).1).unwrap();
                let config: Value = serde_json::from_slice(&blob(&manifest["config"]).1).unwrap();
                assert_eq!(config["architecture"], architecture);
                let [layer] = &manifest["layers"].as_array().unwrap()[..] else { panic!() };
                assert_eq!(config["rootfs"]["diff_ids"], json!([layer["digest"]]));
                let tar = out.join("layer");
                fs::write(&tar, blob(layer).1).unwrap();
                let list = command::read(words("tar -tf").arg(&tar)).unwrap();
                let list: Vec<&str> = list.lines().filter(|name| !name.ends_with('/')).collect();
                assert_eq!(list.len(), image.files.len(), "{list:?}");
                for (file, to) in image.files {
                    assert_eq!(member(&tar, to), format!("the {file}").into_bytes());
                }
                let entry = config["config"]["Entrypoint"][0].as_str().unwrap();
                assert!(list.contains(&&entry[1..]), "{entry}: {list:?}");
                let first = fs::read(&archive).unwrap();
                let again = fs::read(image.archive(&out, processor).unwrap()).unwrap();
                assert!(first == again, "another archive");
            }
        }
        assert!(IMAGES[0].archive(&out, "riscv64").is_err());
        fs::remove_dir_all(&out).unwrap();
    }

    /// A program that is there as a static one, in the place of both.
    #[test]
    fn podman_runs_an_archive() {
        if !machine::is_root() || !is_installed("podman") || !is_installed("rustc") {
            println!("SKIPPED images::podman_runs: no podman, or not root");
            return;
        }
        let processor = "x86_64";
        if !machine::is_of(processor) {
            return;
        }
        let out = files::scratch("loaded").unwrap();
        let source = out.join("version.rs");
        files::write(&source, format!("fn main() {{ println!(\"stand-in {VERSION}\"); }}"))
            .unwrap();
        let program = out.join(processor).join("rocinante");
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        let mut rustc = words("rustc -C target-feature=+crt-static --target");
        rustc.arg("x86_64-unknown-linux-gnu");
        command::run(rustc.arg(&source).arg("-o").arg(&program)).unwrap();
        for name in ["rocinante-agent", "rocinante-kube"] {
            files::copy(&program, out.join(processor).join(name)).unwrap();
        }
        files::write(out.join(processor).join("agent/agent.toml"), "").unwrap();
        make(&out, processor).unwrap();
        fs::remove_dir_all(&out).unwrap();
    }
}
