//! The files in `docs/examples`, which others copy.

use super::{Running, rocinante};
use nix::sys::signal::Signal;
use rocinante_lab::{Lab, LabConfig};
use rocinante_tests::{need, require};
use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use yaml_rust2::{Yaml, YamlLoader};

pub(super) fn path(name: &str) -> String {
    format!("{}/../docs/examples/{name}", env!("CARGO_MANIFEST_DIR"))
}

pub(super) fn documents(name: &str) -> Vec<Yaml> {
    YamlLoader::load_from_str(&fs::read_to_string(path(name)).unwrap()).unwrap()
}

/// The last step of the workflow, as a runner runs it: `bash -e`.
#[test]
fn the_workflow_measures_between_two_processes() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let workflow = &documents("ci.yml")[0];
    let steps = workflow["jobs"]["rdma"]["steps"].as_vec().unwrap();
    let script = steps.last().unwrap()["run"].as_str().unwrap();
    let folder = tempfile::TempDir::new().unwrap();
    let folder = folder.path();
    symlink(env!("CARGO_BIN_EXE_rocinante-under-test"), folder.join("rocinante")).unwrap();
    let path = std::env::var("PATH").unwrap();
    let mut bash = Command::new("bash");
    bash.args(["-e", "-c", script]).current_dir(folder).stdin(Stdio::null());
    bash.env("PATH", format!("{}:{path}", folder.display()));
    bash.stdout(Stdio::piped()).stderr(Stdio::piped());
    // Its loopback is a network of its own: 127.0.0.1 is free there.
    Running::of(lab.container(0).spawn(&mut bash).unwrap()).finish().succeeded();
    let result = fs::read_to_string(folder.join("result.txt")).unwrap();
    assert!(result.lines().last().unwrap().contains("gbps"), "{result}");
}

#[test]
fn the_deployment_is_ready_and_its_policy_lets_rocev2_through() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let documents = documents("kubernetes.yaml");
    let kind = |name| documents.iter().find(|it| it["kind"].as_str() == Some(name)).unwrap();
    let (deployment, policy) = (kind("Deployment"), kind("NetworkPolicy"));
    let pod = &deployment["spec"]["template"];
    let labels = &pod["metadata"]["labels"];
    assert_eq!(&deployment["spec"]["selector"]["matchLabels"], labels);
    assert_eq!(&policy["spec"]["podSelector"]["matchLabels"], labels);
    for direction in ["ingress", "egress"] {
        let port = &policy["spec"][direction][0]["ports"][0];
        assert_eq!((port["port"].as_i64(), port["protocol"].as_str()), (Some(4791), Some("UDP")));
    }
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["securityContext"]["capabilities"]["drop"][0].as_str(), Some("ALL"));
    // The container's command, and its readiness probe, in one network namespace.
    let words = |list: &Yaml| -> Vec<String> {
        list.as_vec().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    let start = |args: &[String]| {
        let mut command = rocinante(args);
        command.env("ROCINANTE_NETDEV", "udp").stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::of(lab.container(0).spawn(&mut command).unwrap())
    };
    let mut server = start(&words(&container["args"])).that_waits();
    let probe = words(&container["readinessProbe"]["exec"]["command"]);
    assert_eq!(probe[0], "/rocinante");
    start(&probe[1..]).finish().succeeded();
    server.child.signal(Signal::SIGTERM);
    server.finish().failed(143, &["SIGTERM"]);
    start(&probe[1..]).finish().failed(1, &["cannot connect"]);
}
