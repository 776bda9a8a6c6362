// Checks whether a history of list-append transactions is linearizable.
//
//	checker [-html out.html] [-timeout 60s] history.jsonl
//
// The history is one JSON object per line, in any order:
//
//	{"process": 3, "call": 12, "return": 34, "txn": [["r", 1, [5, 6]], ["append", 2, 7]], "outcome": "ok"}
//
// "r" reads a whole list, "append" adds to its end; the operations of a transaction take effect in their order, all at one
// moment between call and return. Outcome "ok": it happened, and read what it says. "fail": it certainly did not happen;
// it is left out. "unknown": it may have happened at any time after its call, or never; what it read is not known.
//
// Prints one line of JSON; exit code 0: linearizable, 1: not, 2: no answer in time, 3: the input is no history.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

type step struct {
	append bool
	list   int
	value  int
	read   string // the list as text, for a read
}

type transaction struct {
	steps []step
	known bool
}

// The state maps a list to its values as text. It is never changed in place.
type state map[int]string

var model = porcupine.Model{
	Init: func() interface{} { return state{} },
	Step: func(before, input, output interface{}) (bool, interface{}) {
		return apply(before.(state), input.(transaction))
	},
	Equal: func(one, other interface{}) bool {
		a, b := one.(state), other.(state)
		if len(a) != len(b) {
			return false
		}
		for list, values := range a {
			if b[list] != values {
				return false
			}
		}
		return true
	},
	DescribeOperation: func(input, output interface{}) string {
		txn := input.(transaction)
		words := make([]string, 0, len(txn.steps)+1)
		for _, each := range txn.steps {
			switch {
			case each.append:
				words = append(words, fmt.Sprintf("%d+=%d", each.list, each.value))
			case txn.known:
				words = append(words, fmt.Sprintf("%d=[%s]", each.list, strings.TrimPrefix(each.read, ",")))
			default:
				words = append(words, fmt.Sprintf("%d=?", each.list))
			}
		}
		if !txn.known {
			words = append(words, "(unknown)")
		}
		return strings.Join(words, " ")
	},
	DescribeState: func(each interface{}) string { return fmt.Sprint(each) },
}

func apply(before state, txn transaction) (bool, state) {
	after := before
	for _, each := range txn.steps {
		if !each.append {
			if txn.known && after[each.list] != each.read {
				return false, before
			}
			continue
		}
		copied := make(state, len(after)+1)
		for list, values := range after {
			copied[list] = values
		}
		copied[each.list] = after[each.list] + "," + strconv.Itoa(each.value)
		after = copied
	}
	return true, after
}

type line struct {
	Process int               `json:"process"`
	Call    int64             `json:"call"`
	Return  int64             `json:"return"`
	Txn     []json.RawMessage `json:"txn"`
	Outcome string            `json:"outcome"`
}

func parse(path string) ([]porcupine.Operation, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var operations []porcupine.Operation
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 64<<20)
	for number := 1; scanner.Scan(); number++ {
		operation, keep, err := parseLine(scanner.Bytes())
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if keep {
			operations = append(operations, operation)
		}
	}
	return operations, scanner.Err()
}

func parseLine(text []byte) (porcupine.Operation, bool, error) {
	var read line
	if err := json.Unmarshal(text, &read); err != nil {
		return porcupine.Operation{}, false, err
	}
	txn := transaction{known: read.Outcome == "ok"}
	for _, raw := range read.Txn {
		each, err := parseStep(raw, txn.known)
		if err != nil {
			return porcupine.Operation{}, false, err
		}
		txn.steps = append(txn.steps, each)
	}
	end := read.Return
	switch read.Outcome {
	case "ok":
		if end < read.Call {
			return porcupine.Operation{}, false, fmt.Errorf("returned at %d, before its call at %d", end, read.Call)
		}
	case "unknown":
		end = math.MaxInt64
	case "fail":
		return porcupine.Operation{}, false, nil
	default:
		return porcupine.Operation{}, false, fmt.Errorf("unknown outcome %q", read.Outcome)
	}
	return porcupine.Operation{ClientId: read.Process, Input: txn, Call: read.Call, Output: nil, Return: end}, true, nil
}

func parseStep(raw json.RawMessage, known bool) (step, error) {
	var fields []json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return step{}, err
	}
	if len(fields) != 3 {
		return step{}, fmt.Errorf("a step of %d fields", len(fields))
	}
	var verb string
	var out step
	if err := json.Unmarshal(fields[0], &verb); err != nil {
		return step{}, err
	}
	if err := json.Unmarshal(fields[1], &out.list); err != nil {
		return step{}, err
	}
	switch verb {
	case "append":
		out.append = true
		return out, json.Unmarshal(fields[2], &out.value)
	case "r":
		var values []int
		if err := json.Unmarshal(fields[2], &values); err != nil {
			return step{}, err
		}
		if known && values == nil {
			return step{}, fmt.Errorf("a read of list %d without an answer", out.list)
		}
		var text strings.Builder
		for _, value := range values {
			text.WriteByte(',')
			text.WriteString(strconv.Itoa(value))
		}
		out.read = text.String()
		return out, nil
	}
	return step{}, fmt.Errorf("unknown step %q", verb)
}

func main() {
	html := flag.String("html", "", "where to draw a history that is not linearizable")
	timeout := flag.Duration("timeout", time.Minute, "give up after this long")
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(3)
	}
	operations, err := parse(flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
	result, info := porcupine.CheckOperationsVerbose(model, operations, *timeout)
	verdict := map[porcupine.CheckResult]string{porcupine.Ok: "linearizable", porcupine.Illegal: "not linearizable"}[result]
	code := map[porcupine.CheckResult]int{porcupine.Ok: 0, porcupine.Illegal: 1}
	exit, decided := code[result]
	if !decided {
		verdict, exit = "unknown", 2
	}
	if *html != "" && result == porcupine.Illegal {
		if err := porcupine.VisualizePath(model, info, *html); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	answer, _ := json.Marshal(map[string]interface{}{"verdict": verdict, "operations": len(operations)})
	fmt.Println(string(answer))
	os.Exit(exit)
}
