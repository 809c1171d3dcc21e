//! Each backend beside its ceiling: see [`rocinante_benches::e2e`].

fn main() -> Result<(), Box<dyn std::error::Error>> {
    rocinante_benches::e2e::main()
}
