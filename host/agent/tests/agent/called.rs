//! Engines' names for containers, by the control groups of their processes.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rocinante_agent::control::{self, About};
use rustix::fs::{AtFlags, Mode, OFlags, mkdirat, openat, unlinkat};

use crate::asker::{As, Asker};
use crate::lab::{host_or_skip, skip};

/// Control groups of this test's own, each in the one before.
struct Groups(Vec<(OwnedFd, Vec<u8>)>);

impl Groups {
    /// Below the root of a hierarchy, with these names in a group that no other test has.
    fn new(names: &[&[u8]]) -> io::Result<Self> {
        let mounts = fs::read_to_string("/proc/mounts")?;
        let of = |kind: &str| {
            let mut mount = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
            mount.find(|it| it.get(2) == Some(&kind)).map(|it| PathBuf::from(it[1]))
        };
        let root = of("cgroup2").or_else(|| of("cgroup")).ok_or(io::ErrorKind::NotFound)?;
        let mut groups = Self(Vec::new());
        let mut above = OwnedFd::from(File::open(root)?);
        let own = format!("rocinante-test-{}", unique()).into_bytes();
        for name in std::iter::once(&own[..]).chain(names.iter().copied()) {
            mkdirat(&above, name, Mode::from_raw_mode(0o755))?;
            let inner = openat(&above, name, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
            groups.0.push((above, name.to_vec()));
            above = inner?;
        }
        // Of the innermost nothing is removed.
        groups.0.push((above, Vec::new()));
        Ok(groups)
    }

    /// Moves a program into the innermost.
    fn take(&self, asker: &Asker) {
        let (inner, _) = self.0.last().expect("one");
        let procs = openat(inner, "cgroup.procs", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
        let mut procs = File::from(procs.expect("a control group"));
        procs.write_all(asker.id().to_string().as_bytes()).expect("moved");
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for (above, name) in self.0.iter().rev().filter(|(_, name)| !name.is_empty()) {
            // A process that was killed leaves its group a little later.
            for _ in 0..500 {
                match unlinkat(above, &name[..], AtFlags::REMOVEDIR) {
                    Err(rustix::io::Errno::BUSY) => {
                        std::thread::sleep(std::time::Duration::from_millis(10));
                    }
                    _ => break,
                }
            }
        }
    }
}

fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{:x}{:02x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// An id that no other container has.
fn id() -> String {
    format!("{:0<64}", unique())
}

/// Control groups, or a `SKIPPED` line and a return from the calling test.
macro_rules! groups_or_skip {
    ($name:literal, $names:expr) => {
        match Groups::new($names) {
            Ok(groups) => groups,
            Err(error) => return skip($name, &format!("no control group: {error}")),
        }
    };
}

#[test]
fn each_container_has_the_name_of_its_control_group() {
    let mut host = host_or_skip!("called::each_container", 3);
    let ids = [id(), id()];
    let [docker, podman] = [format!("docker-{}.scope", ids[0]), format!("libpod-{}", ids[1])];
    // The inner one may be the work of the container.
    let forged = format!("docker-{}.scope", ids[0]);
    let groups = [
        groups_or_skip!("called::each_container", &[docker.as_bytes()]),
        groups_or_skip!("called::each_container", &[podman.as_bytes(), forged.as_bytes()]),
    ];
    // A class is chosen by the engine's own word.
    host.configure("class = [{ name = \"gold\", engines = [\"docker\", \"test\"] }]");
    host.start();
    let mut askers: Vec<Asker> = (0..3).map(|of| host.asker(of)).collect();
    groups.iter().zip(&askers).for_each(|(groups, asker)| groups.take(asker));
    host.grant_each(&mut askers);
    for _restarted in [false, true] {
        let status = host.status();
        let named = |of: usize| {
            let all = status["containers"].as_array().expect("a list");
            let own = all.iter().find(|it| it["name"] == format!("veth{of}")).expect("known");
            ["engine", "id"].map(|key| own[key].as_str().map(str::to_owned))
        };
        assert_eq!(named(0), [Some("docker".into()), Some(ids[0].clone())]);
        assert_eq!(named(1), [Some("libpod".into()), Some(ids[1].clone())]);
        assert_eq!(named(2), [None, None]);
        assert!(!status.to_string().contains("gold"), "{status:#}");
        let (is_good, said) = host.operator(&["status", &ids[1][..8]]);
        assert!(is_good && said.contains("\"veth1\"") && !said.contains("\"veth0\""), "{said}");
        host.kill();
        host.start();
    }
    for words in ["attached", "granted"] {
        host.logged(&[words, &format!("container=\"veth0 (docker {})\"", &ids[0][..12])]);
        host.logged(&[words, "container=\"veth2\""]);
    }
    // The engine's own word is the last one.
    let about = About {
        namespace: host.container(0).netns().path().into(),
        interface: None,
        id: "c0ffee0".into(),
        engine: "test".into(),
        pod: None,
        class: None,
        rates: None,
        mtu: None,
    };
    control::introduce(&host.control(), &about).expect("served");
    askers[0].granted(host.addresses(0)[0]);
    assert_eq!(host.status()["containers"][0]["id"], "c0ffee0");
    assert_eq!(host.status()["containers"][0]["class"]["name"], "gold");
    let (is_good, said) = host.operator(&["status", &ids[0][..8]]);
    assert!(!is_good, "{said}");
    // Also that of a container which gets nothing.
    host.configure("self_administered = \"refuse\"");
    host.kill();
    host.start();
    let mut root = Asker::start(host.container(1).netns(), &host.socket(), As::Root);
    groups[1].take(&root);
    assert!(root.refused(host.addresses(1)[0]).contains("its own addresses"));
    host.logged(&["refused", &format!("(libpod {})\"", &ids[1][..12])]);
    drop((askers, root));
}

/// A process in a namespace of its own that takes too long to be searched keeps the closed ports of
/// its own container alone.
#[test]
fn a_process_that_cannot_be_searched_keeps_the_ports_of_its_container() {
    let mut host = host_or_skip!("called::a_process_that_cannot_be_searched", 3);
    let scopes = [(); 3].map(|()| format!("docker-{}.scope", id()));
    let groups = [
        groups_or_skip!("called::a_process_that_cannot_be_searched", &[scopes[0].as_bytes()]),
        groups_or_skip!("called::a_process_that_cannot_be_searched", &[scopes[1].as_bytes()]),
        groups_or_skip!("called::a_process_that_cannot_be_searched", &[scopes[2].as_bytes()]),
    ];
    host.start();
    let stranger = |of: usize| {
        let own = std::env::current_exe().expect("this program");
        let mut command = Command::new("unshare");
        command.args(["--user", "--net"]).arg(own);
        let mut it = Asker::of_command(host.container(0).netns(), &host.socket(), &mut command);
        groups[of].take(&it);
        assert_eq!(it.tell("obstruct 4000"), "done");
        it
    };
    let closes = |mut asker: Asker, of: usize| {
        asker.granted(host.addresses(of)[0]);
        assert_eq!(asker.tell("close"), "done");
        asker
    };
    let [first, second, nameless] = [0, 1, 2].map(|of| host.asker(of));
    groups[0].take(&first);
    // The second asks for nothing, so that the agent does not know it; the third is none.
    groups[1].take(&second);
    let others = [stranger(1), stranger(2)];
    let first = closes(first, 0);
    host.has_ports(0);
    let nameless = closes(nameless, 2);
    host.has_ports(0);
    let own = stranger(0);
    let nameless = closes(nameless, 2);
    host.has_ports(0);
    let first = closes(first, 0);
    std::thread::sleep(std::time::Duration::from_secs(6));
    assert_eq!(host.ports(), 1);
    own.kill();
    host.has_ports(0);
    others.into_iter().for_each(Asker::kill);
    drop((first, second, nameless));
}

/// Paths that are longer than the kernel shows, and names that a terminal would obey.
#[test]
fn a_path_that_is_no_name_changes_nothing() {
    let mut host = host_or_skip!("called::a_path_that_is_no_name", 2);
    let [cut, name] = [id(), id()];
    let odd = b"docker-\x1b[2J\xff\"";
    let [first, scope] = [&cut, &name].map(|id| format!("docker-{id}.scope"));
    let deep = [&[first.as_bytes()][..], &[&[b'd'; 250][..]; 17]].concat();
    let groups = [
        groups_or_skip!("called::a_path_that_is_no_name", &deep),
        groups_or_skip!("called::a_path_that_is_no_name", &[odd, scope.as_bytes(), odd]),
    ];
    host.start();
    let mut askers: Vec<Asker> = (0..2).map(|of| host.asker(of)).collect();
    groups.iter().zip(&askers).for_each(|(groups, asker)| groups.take(asker));
    host.grant_each(&mut askers);
    let containers = host.status()["containers"].clone();
    // The kernel shows the beginning of a path, or nothing.
    assert!([().into(), cut.into()].contains(&containers[0]["id"]), "{containers:#}");
    assert_eq!(containers[1]["id"], name);
    let text = host.log().join("\n");
    assert!(!text.contains(['\u{1b}', '\u{fffd}']), "{text:?}");
    drop(askers);
}
