//! The agent as its unit of systemd starts it.

use std::process::Command;

use rocinante_netdev::Backend;

use crate::lab::host_or_skip;

const UNIT: &str = include_str!("../../dist/rocinante-agent.service");

fn words(option: &str) -> Vec<&'static str> {
    let value = UNIT.lines().find_map(|line| line.strip_prefix(option)?.strip_prefix('='));
    value.expect("the option").split_whitespace().collect()
}

#[test]
fn it_works_with_the_rights_of_the_unit() {
    let mut host = host_or_skip!("unit::it_works_with_the_rights", 1);
    let rights = words("CapabilityBoundingSet").into_iter().map(|right| {
        let right = right.strip_prefix("CAP_").expect("a right");
        format!(",+{}", right.to_lowercase())
    });
    let rights: String = rights.collect();
    assert_eq!(words("NoNewPrivileges"), ["yes"]);
    let agent = host.command();
    let mut command = Command::new("setpriv");
    command.args([&format!("--bounding-set=-all{rights}"), "--inh-caps=-all", "--no-new-privs"]);
    command.arg(agent.get_program()).args(agent.get_args());
    host.start_as(command);
    let [v4, v6] = host.addresses(0);
    let mut asker = host.asker(0);
    asker.granted(v4);
    assert!(host.may_leave(0).contains(&v6));
    asker.opened(Backend::Xdp, v6);
    assert_eq!((host.ports(), host.guarded_rings()), (2, 1));
    let status = std::fs::read_to_string(format!("/proc/{}/status", host.agent_id()));
    let status = status.expect("a process");
    let set = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    // It has dropped the capability that only its start needs.
    assert_eq!(set("CapEff:"), set("CapBnd:"));
    assert_eq!(set("CapEff:"), Some("\t00000080002870e0"));
}

/// The last line of those that systemd knows holds.
#[test]
fn its_type_is_known_to_each_systemd() {
    let types = UNIT.lines().filter_map(|line| line.strip_prefix("Type="));
    assert_eq!(types.collect::<Vec<_>>(), ["notify", "notify-reload"]);
}

#[test]
fn a_configuration_is_checked_without_an_agent() {
    let check = |file: &std::path::Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rocinante-agent"));
        let output = command.arg("check").arg(file).output().expect("it runs");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/dist/agent.toml");
    assert_eq!(check(shipped.as_ref()), (true, String::new()));
    let wrong = std::env::temp_dir().join(format!("agent-check-{}.toml", std::process::id()));
    std::fs::write(&wrong, "ports_max = 0\n").expect("written");
    let (is_good, said) = check(&wrong);
    std::fs::remove_file(&wrong).expect("removed");
    assert!(!is_good && said.contains("ports_max is at least 1"), "{said}");
}

/// The policy compiles beside the names that it needs of the distribution's.
#[test]
fn the_module_for_selinux_compiles() {
    const HERE: &str = env!("CARGO_MANIFEST_DIR");
    let [module, base] = ["dist/rocinante.cil", "tests/agent/base.cil"];
    let out = std::env::temp_dir().join(format!("agent-policy-{}", std::process::id()));
    std::fs::create_dir(&out).expect("a directory");
    let mut command = Command::new("secilc");
    command.args(["-M", "1", "-o"]).arg(out.join("policy")).arg("-f").arg(out.join("contexts"));
    command.args([base, module].map(|file| format!("{HERE}/{file}")));
    let compiled = command.output();
    let contexts = std::fs::read_to_string(out.join("contexts"));
    std::fs::remove_dir_all(&out).expect("removed");
    let compiled = match compiled {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return println!("SKIPPED unit::the_module_for_selinux_compiles: no secilc");
        }
        compiled => compiled.expect("it runs"),
    };
    assert!(compiled.status.success(), "{compiled:?}");
    let contexts = contexts.expect("written");
    for file in ["/run/rocinante(/.*)?", "/usr/bin/rocinante-agent"] {
        assert!(contexts.lines().any(|line| line.starts_with(file)), "{contexts}");
    }
}
