//! Reservations in Kubernetes: parameters of claims, annotations, requests of schedulers.

use rocinante_kube::fuzzing;

pub(super) fn run(data: &[u8]) {
    fuzzing::parameters(data);
    fuzzing::annotation(data);
    fuzzing::body(data);
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    let texts = [
        r#"{"backend":"packet","limit":"5G","class":"gold"}"#,
        r#"{"limit":"2M","backend":"udp"}"#,
        r#"{"limit":"1e9","class":"a.b_c-d","backend":"auto"}"#,
        r#"[{"min_tx_rate":3000,"max_tx_rate":5000},{"min_tx_rate":500,"min_rx_rate":7}]"#,
        r#"[{"min_tx_rate":3000},{"min_tx_rate":3000},{"min_tx_rate":8000}]"#,
        r#"[{"name":"ens1","egress":10000000000,"ingress":5},{"name":"ens2","egress":1}]"#,
        r#"[{"uplink":"ens1","egress":3000000000,"ingress":0,"max":5000000000}]"#,
        r#"{"Pod":{"metadata":{"uid":"u","annotations":{"rdma_interfaces_required":"[{}]"}}},
            "Nodes":null,"NodeNames":["n1","n2","n3"]}"#,
        r#"{"pod":{"metadata":{}},"nodes":{"items":[{"metadata":{"name":"n1"}},
            {"metadata":{"name":"n\u0032"},"spec":{}}]}}"#,
        r#"{"PodName":"p","PodNamespace":"n","PodUID":"u","Node":"n1"}"#,
    ];
    texts.map(|text| text.as_bytes().to_vec()).into()
}
