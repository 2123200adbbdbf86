//! Suggestions for misspelt words.

/// Length in bytes from which a word is not compared, so that time and memory are bounded.
const MAX_WORD: usize = 128;

/// Returns the number of letters to change to make one word from another. Words whose lengths differ by more than two
/// letters are no misspellings of each other and are not compared: the result is then the difference.
pub(crate) fn distance(one: &str, other: &str) -> usize {
    if one.len().max(other.len()) > MAX_WORD {
        return one.len().abs_diff(other.len()).max(3);
    }
    let difference = one.chars().count().abs_diff(other.chars().count());
    if difference > 2 { difference } else { strsim::damerau_levenshtein(one, other) }
}

/// Returns the known word that was probably meant.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    if word.len() > MAX_WORD {
        return None;
    }
    let word = word.to_lowercase().replace(['-', '_'], "");
    let likeness = |known: &str| strsim::jaro_winkler(&word, &known.to_lowercase().replace('_', ""));
    let (best, score) =
        known.iter().map(|known| (*known, likeness(known))).max_by(|a, b| a.1.total_cmp(&b.1))?;
    (score > 0.84).then_some(best)
}

/// Remedy for `${NAME}`.
pub(crate) const VARIABLE: &str =
    "variables are not replaced here; replace them first, for example with envsubst";
