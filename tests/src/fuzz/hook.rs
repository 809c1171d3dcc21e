//! Messages of engines about containers: the state that the hook gets, and control groups.

use rocinante_agent::fuzzing;

pub(super) fn run(data: &[u8]) {
    fuzzing::state(data);
    fuzzing::groups(data);
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    let id = "6d5fe22c86c363fd26a5e03edf8ea9d40a9e51ae948d4a39d79184cad9c0d8ee";
    let texts = [
        r#"{"ociVersion":"1.0.2","id":"ID","status":"creating","pid":4711,"bundle":"/b",
            "annotations":{"io.container.manager":"libpod","org.opencontainers.image.stopSignal":"15"}}"#,
        r#"{"id":"ID","pid":1}"#,
        r#"{"id":"\u0000\ud83d\ude00","pid":4294967295,"annotations":{"io.container.manager":"cri-o"}}"#,
        "11:memory:/docker/ID\n1:name=systemd:/docker/ID\n0::/\n",
        "0::/machine.slice/libpod-ID.scope/container\n",
        "0::/default/one.a-b\n",
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-pod0f1e.slice/crio-ID.scope\n",
        "0::/kubepods/besteffort/pod0f1e2d3c/ID\n",
        "0::/libpod_parent/ID/libpod-ID\n",
        "0::/../../system.slice/docker-ID.scope\n",
    ];
    texts.map(|text| text.replace("ID", id).into_bytes()).into()
}
