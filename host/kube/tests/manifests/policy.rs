//! The expressions of the admission policy, as the API server evaluates them.

use cel::{Context, Env, Value as Cel, to_value};
use serde_json::{Value, json};

use crate::of_kind;

const DRIVER: &str = "system:serviceaccount:rocinante:rocinante-driver";
const NODE: &str = "authentication.kubernetes.io/node-name";

/// The value of an expression.
fn value(expression: &Value, context: &Context<'_, '_>) -> Cel {
    let text = expression.as_str().expect("CEL");
    let program = Env::stdlib().compile(text).unwrap_or_else(|why| panic!("{text}: {why}"));
    program.execute(context).unwrap_or_else(|why| panic!("{text}: {why}"))
}

/// Whether the policy admits a request. `None`: the policy is not about it.
fn admits(request: &Value, object: &Value, old: &Value) -> Option<bool> {
    let policy = &of_kind("ValidatingAdmissionPolicy")[0]["spec"];
    let rules = policy["matchConstraints"]["resourceRules"].as_array().expect("rules");
    let has = |list: &Value, it: &Value| list.as_array().is_some_and(|all| all.contains(it));
    let (of, below) = (&request["resource"], request["subResource"].as_str());
    let resource = of["resource"].as_str().expect("a resource");
    let resource = below.map_or(resource.to_owned(), |it| format!("{resource}/{it}"));
    let is_about = |rule: &Value| {
        has(&rule["apiGroups"], &of["group"])
            && has(&rule["operations"], &request["operation"])
            && has(&rule["resources"], &json!(resource))
    };
    if !rules.iter().any(is_about) {
        return None;
    }
    let mut context = Context::default();
    for (name, it) in [("request", request), ("object", object), ("oldObject", old)] {
        context.add_variable_from_value(name, to_value(it).expect("a value"));
    }
    let each = |field: &str| policy[field].as_array().expect("a list").clone();
    let conditions = each("matchConditions").into_iter();
    if !conditions.map(|it| value(&it["expression"], &context)).all(|it| it == Cel::Bool(true)) {
        return None;
    }
    let mut variables = std::collections::HashMap::<String, Cel>::new();
    for variable in each("variables") {
        let name = variable["name"].as_str().expect("a name").to_owned();
        variables.insert(name, value(&variable["expression"], &context));
        context.add_variable_from_value("variables", Cel::from(variables.clone()));
    }
    for it in each("validations") {
        if value(&it["expression"], &context) != Cel::Bool(true) {
            if !it["messageExpression"].is_null() {
                assert!(matches!(value(&it["messageExpression"], &context), Cel::String(_)));
            }
            return Some(false);
        }
    }
    Some(true)
}

/// A request of the driver's account, whose token is of this node.
fn request(operation: &str, [group, resource, below]: [&str; 3], name: &str, node: &str) -> Value {
    let extra = if node.is_empty() { json!({}) } else { json!({NODE: [node]}) };
    let mut request = json!({
        "operation": operation,
        "resource": {"group": group, "version": "v1", "resource": resource},
        "name": name,
        "userInfo": {"username": DRIVER, "extra": extra},
    });
    if !below.is_empty() {
        request["subResource"] = below.into();
    }
    request
}

#[test]
fn a_driver_writes_slices_and_the_object_of_its_own_node() {
    let slices = ["resource.k8s.io", "resourceslices", ""];
    let (own, other) = (json!({"spec": {"nodeName": "n1"}}), json!({"spec": {"nodeName": "n2"}}));
    let none = Value::Null;
    for (operation, node, object, old, admitted) in [
        ("CREATE", "n1", &own, &none, true),
        ("CREATE", "n1", &other, &none, false),
        ("CREATE", "n1", &json!({"spec": {"allNodes": true}}), &none, false),
        ("CREATE", "", &own, &none, false),
        ("CREATE", "", &json!({"spec": {"nodeName": ""}}), &none, false),
        ("UPDATE", "n1", &own, &own, true),
        ("DELETE", "n1", &none, &own, true),
        ("DELETE", "n2", &none, &own, false),
    ] {
        let request = request(operation, slices, "s", node);
        assert_eq!(admits(&request, object, old), Some(admitted), "{request} {object}");
    }
    for (below, name, admitted) in
        [("status", "n1", true), ("", "n1", true), ("status", "n2", false)]
    {
        let object = json!({"metadata": {"name": name}, "spec": {}});
        let request = request("UPDATE", ["", "nodes", below], name, "n1");
        assert_eq!(admits(&request, &object, &object), Some(admitted), "{request}");
    }
    let mut others = request("CREATE", slices, "s", "n1");
    others["userInfo"]["username"] = "system:node:n2".into();
    assert_eq!(admits(&others, &other, &none), None);
}

/// Requests that change the status of claims; on the right the change.
#[test]
fn a_driver_writes_its_devices_in_the_status_of_its_nodes_claims() {
    let share = |driver: &str, pool: &str| json!({"driver": driver, "pool": pool, "device": "d"});
    let ours = |pool: &str| share("rocinante.dev", pool);
    let claim = |results: &[Value], devices: &[Value]| {
        json!({
            "metadata": {"name": "c"},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}],
                "devices": devices,
            },
        })
    };
    let of_claims = ["resource.k8s.io", "resourceclaims", "status"];
    let writes = |node: &str, object: &Value, old: &Value| {
        admits(&request("UPDATE", of_claims, "c", node), object, old).expect("it is about claims")
    };
    let gpu = [share("gpu.example.com", "n9")];
    let both = [&[ours("n1")], &gpu[..]].concat();
    let written = [&gpu[..], &[ours("n1")]].concat();
    let (before, after) = (claim(&both, &gpu), claim(&both, &written));
    assert!(writes("n1", &after, &before) && writes("n1", &after, &after));
    // The first time there are no devices.
    let mut first = before.clone();
    first["status"].as_object_mut().expect("an object").remove("devices");
    assert!(writes("n1", &claim(&both, &[ours("n1")]), &first));
    for node in ["n2", ""] {
        assert!(!writes(node, &after, &before), "{node}");
    }
    for results in [&[ours("n1"), ours("n2")][..], &[ours("n2")], &gpu, &[]] {
        let old = claim(results, &[]);
        assert!(!writes("n1", &claim(results, &[ours("n1")]), &old), "{old}");
    }
    assert!(!writes("n1", &after, &json!({"metadata": {"name": "c"}})));
    for (field, value) in [
        ("/status/allocation/devices/results/0/pool", json!("n2")),
        ("/status/allocation", json!({})),
        ("/status/reservedFor", json!([])),
        ("/status/devices/0/device", json!("e")),
        ("/status/devices", json!([ours("n1")])),
    ] {
        let mut changed = after.clone();
        *changed.pointer_mut(field).expect(field) = value;
        assert!(!writes("n1", &changed, &before), "{field}");
        assert!(!writes("n2", &changed, &before), "{field}");
    }
}
