//! Compiles the kubelet's API in Rust alone: no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let names = ["deviceplugin", "dra", "health", "registration"];
    let files = names.map(|name| format!("proto/{name}.proto"));
    let files = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
