//! Writes the seed inputs of the fuzz targets, made from the captures: `fuzz-corpus DIRECTORY`
//! writes `DIRECTORY/TARGET/N`.

use std::path::PathBuf;
use std::{env, fs};

use rocinante_tests::fuzz::TARGETS;

fn main() -> std::io::Result<()> {
    let Some(directory) = env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: fuzz-corpus DIRECTORY, such as tests/fuzz/corpus");
        std::process::exit(2);
    };
    for target in TARGETS {
        let folder = directory.join(target.name);
        fs::create_dir_all(&folder)?;
        let corpus = (target.corpus)();
        for (n, input) in corpus.iter().enumerate() {
            fs::write(folder.join(format!("{n:04}")), input)?;
        }
        println!("{}: {} inputs", folder.display(), corpus.len());
    }
    Ok(())
}
