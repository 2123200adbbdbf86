//! The stratified Mann-Whitney test (van Elteren with equal weights): do two samples differ in their location?
//!
//! A stratum holds the values of both samples under the same setting, such as one number of connections. The
//! statistic is the sum, over all strata, of the ranks of the first sample within the stratum. Its distribution is
//! exact even with equal values: all assignments of a stratum's ranks to the two samples are counted.

/// Values of both samples under one setting.
#[derive(Clone, Debug, Default)]
pub(super) struct Stratum {
    pub(super) first: Vec<f64>,
    pub(super) second: Vec<f64>,
}

/// Result of the test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RankTest {
    /// Two-sided p-value: probability of a difference at least as large if both samples have the same distribution.
    pub(super) p: f64,
    /// Minimum p-value for samples of these sizes and with these equal values.
    pub(super) least_p: f64,
}

/// Tests the strata in which both samples have values. Returns `None` if there are none.
pub(super) fn test(strata: &[Stratum]) -> Option<RankTest> {
    let mut all = vec![1.0];
    let (mut observed, mut expected) = (0, 0.0);
    let mut is_tested = false;
    for stratum in strata.iter().filter(|stratum| !stratum.first.is_empty() && !stratum.second.is_empty()) {
        let ranks = doubled_ranks(stratum);
        let (own, sum) = (stratum.first.len(), ranks.iter().sum::<usize>());
        observed += ranks[..own].iter().sum::<usize>();
        expected += sum as f64 * own as f64 / ranks.len() as f64;
        all = convolve(&all, &distribution(&ranks, own));
        is_tested = true;
    }
    let distance = |value: usize| (value as f64 - expected).abs();
    // Doubled ranks and their expected sum are whole numbers, so the tolerance only absorbs rounding errors.
    let beyond = |limit: f64| -> f64 {
        let far = all.iter().enumerate().filter(|(value, _)| distance(*value) >= limit - 1e-6);
        far.map(|(_, probability)| probability).sum::<f64>().min(1.0)
    };
    let possible = all.iter().enumerate().filter(|(_, probability)| **probability > 0.0);
    let farthest = possible.map(|(value, _)| distance(value)).fold(0.0, f64::max);
    is_tested.then(|| RankTest { p: beyond(distance(observed)), least_p: beyond(farthest) })
}

/// Returns twice the rank of each value among both samples, those of the first sample first. Equal values have the
/// mean of their ranks, which may be a multiple of one half.
fn doubled_ranks(stratum: &Stratum) -> Vec<usize> {
    let values: Vec<f64> = stratum.first.iter().chain(&stratum.second).copied().collect();
    let rank = |value: &f64| {
        let less = values.iter().filter(|other| *other < value).count();
        let equal = values.iter().filter(|other| *other == value).count();
        2 * less + equal + 1
    };
    values.iter().map(rank).collect()
}

/// Returns the probability of each possible sum of `count` ranks; the index is the sum.
fn distribution(ranks: &[usize], count: usize) -> Vec<f64> {
    let most: usize = ranks.iter().sum();
    let mut ways = vec![vec![0.0; most + 1]; count + 1];
    ways[0][0] = 1.0;
    for (seen, rank) in ranks.iter().enumerate() {
        for taken in (1..=count.min(seen + 1)).rev() {
            for sum in (*rank..=most).rev() {
                ways[taken][sum] += ways[taken - 1][sum - rank];
            }
        }
    }
    let all: f64 = ways[count].iter().sum();
    ways[count].iter().map(|ways| ways / all).collect()
}

/// Returns the distribution of the sum of two independent values.
fn convolve(first: &[f64], second: &[f64]) -> Vec<f64> {
    let mut sums = vec![0.0; first.len() + second.len() - 1];
    for (at, probability) in first.iter().enumerate().filter(|(_, probability)| **probability > 0.0) {
        for (sum, other) in sums[at..].iter_mut().zip(second) {
            *sum += probability * other;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p(strata: &[(&[f64], &[f64])]) -> RankTest {
        let stratum =
            |(first, second): &(&[f64], &[f64])| Stratum { first: first.to_vec(), second: second.to_vec() };
        test(&strata.iter().map(stratum).collect::<Vec<_>>()).unwrap()
    }

    fn close(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-9, "{value} {expected}");
    }

    #[test]
    fn probabilities_are_exact() {
        // Of the 20 assignments, 2 are as extreme as this one.
        close(p(&[(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0])]).p, 0.1);
        close(p(&[(&[4.0, 5.0, 6.0], &[1.0, 2.0, 3.0])]).p, 0.1);
        // R: wilcox.test(1:5, 6:10, exact = TRUE) has p = 0.007937; wilcox.test(c(1, 2, 3, 4, 6), c(5, 7:10)) 0.01587.
        close(p(&[(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0])]).p, 2.0 / 252.0);
        close(p(&[(&[1.0, 2.0, 3.0, 4.0, 6.0], &[5.0, 7.0, 8.0, 9.0, 10.0])]).p, 4.0 / 252.0);
        close(p(&[(&[1.0, 4.0], &[2.0, 3.0])]).p, 1.0);
    }

    #[test]
    fn equal_values_share_a_rank() {
        close(p(&[(&[1.0, 1.0], &[1.0, 1.0])]).p, 1.0);
        // Of 6 assignments of 1, 2.5, 2.5, 4 the sums are 3.5, 3.5, 5, 5, 6.5, 6.5.
        close(p(&[(&[1.0, 2.0], &[2.0, 3.0])]).p, 4.0 / 6.0);
    }

    #[test]
    fn strata_add_up() {
        // One value of each sample in each of 6 strata is the sign test.
        let one: (&[f64], &[f64]) = (&[1.0], &[2.0]);
        close(p(&[one; 6]).p, 2.0 / 64.0);
        close(p(&[one; 6]).least_p, 2.0 / 64.0);
        let other: (&[f64], &[f64]) = (&[2.0], &[1.0]);
        close(p(&[one, other]).p, 1.0);
        // The magnitude of the values of a stratum does not matter, and a stratum with an empty sample is ignored.
        close(p(&[one, (&[1e9], &[2e9]), (&[], &[1.0])]).p, 2.0 / 4.0);
        assert_eq!(test(&[Stratum::default()]), None);
    }

    #[test]
    fn many_rounds_keep_their_precision() {
        let first: Vec<f64> = (0..30).map(f64::from).collect();
        let second: Vec<f64> = first.iter().map(|value| value + 0.5).collect();
        let tested = p(&[(&first, &second)]);
        assert!(tested.p > 0.5 && tested.p <= 1.0 && tested.least_p < 1e-15, "{tested:?}");
    }
}
