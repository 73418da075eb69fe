// Log probabilities of tokens, as the flat columns that the wire has.

package headrace

import "github.com/headrace/headrace/clients/go/headracev1"

// Logprobs are log probabilities (natural logarithm) of a run of tokens, as flat columns.
type Logprobs struct {
	// Sampled has one entry per token: its own log probability.
	Sampled []float32
	// Ranks has one entry per token: its rank among all tokens, 1 being the most likely.
	Ranks []uint32
	// TopCounts has one entry per token: how many entries of the two columns below are its own.
	TopCounts []uint32
	// TopTokenIDs are the most likely tokens of each position, most likely first, one position
	// after another.
	TopTokenIDs []uint32
	// TopLogprobs are their log probabilities.
	TopLogprobs []float32
}

// TokenLogprob is a token and its log probability.
type TokenLogprob struct {
	TokenID uint32
	Logprob float32
}

// Top is the most likely tokens of one position of the run, from 0, most likely first.
func (l *Logprobs) Top(position int) []TokenLogprob {
	first := l.entries(position)
	made := make([]TokenLogprob, l.TopCounts[position])
	for i := range made {
		made[i] = TokenLogprob{l.TopTokenIDs[first+i], l.TopLogprobs[first+i]}
	}
	return made
}

// PromptLogprobs are log probabilities of a run of the prompt's tokens, each given those before it.
// The parts of a prompt come in order and without gaps; the first begins at position 1, because
// nothing precedes the token at 0.
type PromptLogprobs struct {
	// FirstTokenIndex is the position in the prompt of the first of these tokens.
	FirstTokenIndex uint32
	// Logprobs has one entry per token; Sampled is that of the prompt's own token.
	Logprobs Logprobs
}

// NextTokenIndex is the position in the prompt of the token that follows these.
func (p PromptLogprobs) NextTokenIndex() uint32 {
	return p.FirstTokenIndex + uint32(len(p.Logprobs.Sampled))
}

// from is the same columns without the tokens before position.
func (l *Logprobs) from(position int) *Logprobs {
	if l == nil || position == 0 {
		return l
	}
	entries := l.entries(position)
	return &Logprobs{l.Sampled[position:], l.Ranks[position:], l.TopCounts[position:], l.TopTokenIDs[entries:],
		l.TopLogprobs[entries:]}
}

// entries is how many entries of the top columns come before position.
func (l *Logprobs) entries(position int) int {
	count := 0
	for _, n := range l.TopCounts[:position] {
		count += int(n)
	}
	return count
}

// covers tells whether the columns are those of a run of so many tokens; nothing else here checks
// them.
func (l *Logprobs) covers(tokens int) bool {
	if l == nil {
		return true
	}
	perToken := len(l.Sampled) == tokens && len(l.Ranks) == tokens && len(l.TopCounts) == tokens
	return perToken && len(l.TopTokenIDs) == len(l.TopLogprobs) && l.entries(tokens) == len(l.TopTokenIDs)
}

// add appends the columns of the run that follows.
func (l *Logprobs) add(next *Logprobs) {
	l.Sampled = append(l.Sampled, next.Sampled...)
	l.Ranks = append(l.Ranks, next.Ranks...)
	l.TopCounts = append(l.TopCounts, next.TopCounts...)
	l.TopTokenIDs = append(l.TopTokenIDs, next.TopTokenIDs...)
	l.TopLogprobs = append(l.TopLogprobs, next.TopLogprobs...)
}

// logprobsFromProto is nil where there are none.
func logprobsFromProto(l *headracev1.Logprobs) *Logprobs {
	if len(l.GetSampled()) == 0 {
		return nil
	}
	return &Logprobs{l.GetSampled(), l.GetRanks(), l.GetTopCounts(), l.GetTopTokenIds(), l.GetTopLogprobs()}
}

func promptLogprobsFromProto(p *headracev1.PromptLogprobs) PromptLogprobs {
	made := PromptLogprobs{FirstTokenIndex: p.GetFirstTokenIndex()}
	if columns := logprobsFromProto(p.GetLogprobs()); columns != nil {
		made.Logprobs = *columns
	}
	return made
}
