//! Runs the targets without a fuzzer: with their seeds and with random changes of them. Finds obvious errors,
//! not hidden ones.

use std::{fs, path::Path};

use skysail_fuzz::TARGETS;

/// Number of changed seeds per target.
const ROUNDS: usize = 3_000;

/// Fragments that occur in the inputs.
const PIECES: [&[u8]; 16] = [
    b"\r\n", b"\n", b": ", b"%", b"%2e", b"/", b"..", b"0", b"\0", b"\xff", b"chunked", b"-", b"*a", b"&a ",
    b"~", b"=",
];

#[test]
fn seeds_and_their_mutations_cause_no_panic() {
    let mut rng = fastrand::Rng::with_seed(2026);
    for (name, target) in TARGETS {
        let mut seeds = seeds(name);
        assert!(!seeds.is_empty(), "{name} has no seeds");
        seeds.iter().for_each(|seed| target(seed));
        seeds.push(Vec::new());
        for _ in 0..ROUNDS {
            let mut bytes = rng.choice(&seeds).cloned().unwrap_or_default();
            for _ in 0..rng.usize(1..=4) {
                change(&mut bytes, &mut rng);
            }
            target(&bytes);
        }
    }
}

fn seeds(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(name);
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| fs::read(file).unwrap()).collect()
}

fn change(bytes: &mut Vec<u8>, rng: &mut fastrand::Rng) {
    let at = rng.usize(0..=bytes.len());
    let until = rng.usize(at..=bytes.len().min(at + 16));
    match rng.u8(0..5) {
        0 if at < bytes.len() => bytes[at] = rng.u8(..),
        1 => drop(bytes.drain(at..until)),
        2 => bytes.extend_from_within(at..until),
        3 => bytes.truncate(at.max(1)),
        _ => drop(bytes.splice(at..at, PIECES[rng.usize(..PIECES.len())].iter().copied())),
    }
}
