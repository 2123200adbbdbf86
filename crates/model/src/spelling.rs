//! Suggestions for misspelt words.

/// Maximum length in bytes of a word that is compared, so that time and memory are bounded.
const MAX_WORD: usize = 128;

/// Returns the number of letters to add, remove, replace or swap to make one word from another. Words with at least
/// three different letters are no misspellings of each other and are not compared: the result is then three or more.
pub(crate) fn distance(one: &str, other: &str) -> usize {
    if one.len().max(other.len()) > MAX_WORD {
        return one.len().abs_diff(other.len()).max(3);
    }
    let difference = one.chars().count().abs_diff(other.chars().count()).max(different_letters(one, other));
    if difference > 2 { difference } else { strsim::damerau_levenshtein(one, other) }
}

/// Returns a lower bound of the distance of two words: the number of letters that only one of them has, and 0 if they
/// are not ASCII. It costs a hundredth of a comparison.
fn different_letters(one: &str, other: &str) -> usize {
    if !one.is_ascii() || !other.is_ascii() {
        return 0;
    }
    // Letters with the same lower five bits count as equal.
    let mut counts = [0_i32; 32];
    one.bytes().for_each(|letter| counts[usize::from(letter & 31)] += 1);
    other.bytes().for_each(|letter| counts[usize::from(letter & 31)] -= 1);
    let only_in_one: u32 = counts.iter().map(|count| count.max(&0).unsigned_abs()).sum();
    let only_in_other: u32 = counts.iter().map(|count| count.min(&0).unsigned_abs()).sum();
    only_in_one.max(only_in_other) as usize
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn words_that_are_not_compared_have_three_different_letters(one in "[aAbBcd-]{0,8}", other in "[aAbBcdä]{0,8}") {
            let real = strsim::damerau_levenshtein(&one, &other);
            prop_assert!(different_letters(&one, &other) <= real);
            prop_assert_eq!(distance(&one, &other).min(3), real.min(3));
        }
    }
}
