//! Suggestions for misspelt words.

/// Returns the known word that was probably meant.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let word = word.to_lowercase().replace(['-', '_'], "");
    let likeness = |known: &str| strsim::jaro_winkler(&word, &known.to_lowercase().replace('_', ""));
    let (best, score) =
        known.iter().map(|known| (*known, likeness(known))).max_by(|a, b| a.1.total_cmp(&b.1))?;
    (score > 0.84).then_some(best)
}

/// Remedy for `${NAME}`.
pub(crate) const VARIABLE: &str =
    "variables are not replaced here; replace them first, for example with envsubst";
