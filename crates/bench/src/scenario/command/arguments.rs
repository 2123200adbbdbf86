//! Arguments of a case with those of a size.

/// An option or a positional argument with the words that belong to it.
type Words<'a> = Vec<&'a str>;

/// Returns the arguments of a case, in which those of a size replace options of the same name. Others are added.
pub(super) fn merged(of_case: &str, of_size: &str) -> String {
    let mut added = options(of_size);
    let replaced = |option: Words<'_>| match added.iter().position(|other| name(other) == name(&option)) {
        Some(index) => added.remove(index).join(" "),
        None => option.join(" "),
    };
    let mut all: Vec<String> = options(of_case).into_iter().map(replaced).collect();
    all.extend(added.iter().map(|option| option.join(" ")));
    all.join(" ")
}

/// Splits arguments into options, each with its value.
fn options(arguments: &str) -> Vec<Words<'_>> {
    let mut all: Vec<Words<'_>> = Vec::new();
    for word in arguments.split_whitespace() {
        match all.last_mut() {
            Some(option) if !word.starts_with("--") => option.push(word),
            _ => all.push(vec![word]),
        }
    }
    all
}

/// Returns the name of an option, without a value that follows an equals sign.
fn name<'a>(option: &[&'a str]) -> &'a str {
    let word = option.first().copied().unwrap_or_default();
    word.split_once('=').map_or(word, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_size_replace_those_of_a_case() {
        for (of_case, of_size, expected) in [
            (
                "--sidecars 100 --tls --churn 5",
                "--churn=9 --seconds 2",
                "--sidecars 100 --tls --churn=9 --seconds 2",
            ),
            ("--sidecars=100", "--sidecars 5", "--sidecars 5"),
            ("", "--sidecars 5", "--sidecars 5"),
            ("--sidecars 5", "", "--sidecars 5"),
            ("--sidecars 5", "7", "--sidecars 5 7"),
        ] {
            assert_eq!(merged(of_case, of_size), expected);
        }
    }
}
